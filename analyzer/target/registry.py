"""The table in which the target registers its models, in any of its forms.

Two forms exist: a dict of names to tuples of imported classes, and a dict of names to lists of (module,
class) strings that are imported on use. Both are module-level dict literals somewhere under `executor/`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kvskill.analyzer.target.classes import SourceTree, module_statements
from kvskill.diagnostics import Span
from kvskill.source import SourceFile

__all__ = ["Registered", "Registry", "read_registry"]


@dataclass(frozen=True)
class Registered:
    """One registered model: its key, its (module, class) pairs, and where it stands."""

    key: str
    classes: tuple[tuple[str, str], ...]
    span: Span


@dataclass(frozen=True)
class Registry:
    """The registry; `form` is None where the target has none."""

    form: str | None = None
    models: tuple[Registered, ...] = ()

    def for_folder(self, folder: str) -> tuple[Registered, ...]:
        """Entries whose model (the first class; others may be shared) lives in a folder, as `models/qwen`."""
        prefix = folder.replace("/", ".").strip(".") + "."
        return tuple(m for m in self.models if m.classes[0][0].startswith(prefix))


def read_registry(tree: SourceTree) -> Registry:
    """Find the registry. The dict with most model classes wins where there are several."""
    best = Registry()
    for file in tree.containing(r"\bmodels\."):
        imported = _imports(file)
        for stmt in module_statements(file.tree.body):
            if not isinstance(stmt, (ast.Assign, ast.AnnAssign)) or not isinstance(stmt.value, ast.Dict):
                continue
            found = tuple(_entries(file, stmt.value, imported))
            if len(found) > len(best.models):
                target = stmt.targets[0] if isinstance(stmt, ast.Assign) else stmt.target
                lazy = not imported.keys() & {c for m in found for _, c in m.classes}
                kind = "lazy" if lazy else "imported"
                best = Registry(f"{file.shown}:{ast.unparse(target)} ({kind})", found)
    return best


def _imports(file: SourceFile) -> dict[str, tuple[str, str]]:
    """Local name -> (module, class) of the absolute imports of a file."""
    out = {}
    for stmt in module_statements(file.tree.body):
        if isinstance(stmt, ast.ImportFrom) and stmt.module and not stmt.level:
            for alias in stmt.names:
                out[alias.asname or alias.name] = (stmt.module, alias.name)
    return out


def _entries(file: SourceFile, table: ast.Dict, imported: dict[str, tuple[str, str]]) -> Iterator[Registered]:
    for key, value in zip(table.keys, table.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            continue
        if not isinstance(value, (ast.Tuple, ast.List)):
            continue
        classes = []
        for item in value.elts:
            if isinstance(item, ast.Name) and item.id in imported:
                classes.append(imported[item.id])
            elif isinstance(item, (ast.Tuple, ast.List)) and len(item.elts) == 2:
                texts = (e.value for e in item.elts if isinstance(e, ast.Constant))
                pair = [t for t in texts if isinstance(t, str)]
                if len(pair) == 2:
                    classes.append((pair[0], pair[1]))
        if classes and len(classes) == len(value.elts):
            yield Registered(key.value, tuple(classes), file.span(key))
