"""Class definitions of a source tree, found through imports and never by file name.

The target framework moves its classes between modules; what stays is that a name is imported from where it
is defined. `SourceTree` finds the definitions of a class name under one package, follows re-exports, and
lists the fields that its constructor takes (dataclass fields with those of its bases, else the parameters
of `__init__`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvskill.diagnostics import InputError, Span
from kvskill.source import SourceFile, read_source

__all__ = ["ClassFact", "FieldFact", "SourceTree", "module_statements"]

_MAX_FILES = 4000


@dataclass(frozen=True)
class FieldFact:
    """One constructor field: its name, the source text of annotation and default, and where it stands."""

    name: str
    annotation: str
    default: str | None
    span: Span


@dataclass(frozen=True)
class ClassFact:
    """A class and the fields that its constructor takes, bases first."""

    name: str
    module: str
    fields: tuple[FieldFact, ...]
    methods: tuple[str, ...]
    bases: tuple[str, ...]
    span: Span
    file: SourceFile
    node: ast.ClassDef

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)


def module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module or class body runs, inside `if`, `try` and `with` too."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, (ast.If, ast.With)):
            yield from module_statements(stmt.body)
            yield from module_statements(getattr(stmt, "orelse", []))
        elif isinstance(stmt, ast.Try):
            for part in (stmt.body, stmt.orelse, stmt.finalbody, *(h.body for h in stmt.handlers)):
                yield from module_statements(part)


class SourceTree:
    """The Python files of one package folder under a repository root. Files are parsed on demand."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.package = package
        self._parsed: dict[Path, SourceFile | None] = {}
        self._resolving: set[tuple[str, str]] = set()
        self.broken: list[InputError] = []

    @cached_property
    def files(self) -> tuple[tuple[Path, bytes], ...]:
        """(path, bytes) of every Python file of the package, in a fixed order; links out of the tree are
        skipped.
        """
        top = self.root / self.package
        found = []
        real_root = self.root.resolve()
        for path in sorted(top.rglob("*.py"))[:_MAX_FILES]:
            if not path.is_file() or real_root not in path.resolve().parents:
                continue
            try:
                found.append((path, path.read_bytes()))
            except OSError:
                continue
        return tuple(found)

    def containing(self, pattern: str) -> Iterator[SourceFile]:
        """Parsed files whose bytes match a regular expression (only to skip the others quickly)."""
        wanted = re.compile(pattern.encode(), re.MULTILINE)
        for path, raw in self.files:
            if wanted.search(raw):
                parsed = self.parse(path)
                if parsed is not None:
                    yield parsed

    def parse(self, path: Path) -> SourceFile | None:
        """The parsed file, or None where it is not valid Python (kept in `broken`)."""
        if path not in self._parsed:
            try:
                self._parsed[path] = read_source(path, path.relative_to(self.root).as_posix())
            except InputError as exc:
                self.broken.append(exc)
                self._parsed[path] = None
        return self._parsed[path]

    def module_of(self, file: SourceFile) -> str:
        """Dotted module name of a file of the tree."""
        parts = list(file.path.relative_to(self.root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def module_file(self, module: str) -> SourceFile | None:
        """The file of a dotted module name, if it is in this repository."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return self.parse(path)
        return None

    def definitions(self, name: str) -> list[ClassFact]:
        """Every class statement with this name in the package, in file order."""
        facts = []
        for file in self.containing(rf"\bclass\s+{re.escape(name)}\b"):
            for stmt in module_statements(file.tree.body):
                if isinstance(stmt, ast.ClassDef) and stmt.name == name:
                    facts.append(self._class_fact(file, stmt))
        return facts

    def find(self, name: str) -> tuple[ClassFact | None, list[ClassFact]]:
        """(the class in use, all candidates). With several definitions the one that the package imports
        wins.
        """
        found = self.definitions(name)
        if len(found) <= 1:
            return (found[0] if found else None), found
        used: dict[str, int] = {}
        for file in self.containing(rf"\b{re.escape(name)}\b"):
            target = self.resolve(self.module_of(file), name)
            if target is not None and target.file.path != file.path:
                used[target.span.path] = used.get(target.span.path, 0) + 1
        imported = [f for f in found if f.span.path in used]
        return (imported[0] if len(imported) == 1 else None), found

    def resolve(self, module: str, name: str) -> ClassFact | None:
        """The class that `name` means inside `module`, following imports; None when it leaves the
        repository.
        """
        if (module, name) in self._resolving:
            return None
        self._resolving.add((module, name))
        try:
            file = self.module_file(module)
            if file is None:
                return None
            for stmt in module_statements(file.tree.body):
                if isinstance(stmt, ast.ClassDef) and stmt.name == name:
                    return self._class_fact(file, stmt)
                if isinstance(stmt, ast.ImportFrom):
                    for alias in stmt.names:
                        if (alias.asname or alias.name) == name:
                            return self.resolve(self._import_base(file, stmt), alias.name)
                        if alias.name == "*":
                            hit = self.resolve(self._import_base(file, stmt), name)
                            if hit is not None:
                                return hit
                if isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Name):
                    if any(isinstance(t, ast.Name) and t.id == name for t in stmt.targets):
                        return self.resolve(module, stmt.value.id)
            return None
        finally:
            self._resolving.discard((module, name))

    def _import_base(self, file: SourceFile, stmt: ast.ImportFrom) -> str:
        if not stmt.level:
            return stmt.module or ""
        parts = self.module_of(file).split(".")
        if file.path.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - (stmt.level - 1)]
        return ".".join([*parts, *(stmt.module or "").split(".")]).strip(".")

    def _class_fact(self, file: SourceFile, node: ast.ClassDef) -> ClassFact:
        module = self.module_of(file)
        fields: dict[str, FieldFact] = {}
        bases = []
        for base in node.bases:
            text = ast.unparse(base)
            bases.append(text)
            parent = self.resolve(module, text) if text != node.name else None
            if parent is not None:
                fields.update({f.name: f for f in parent.fields})
        fields.update({f.name: f for f in _own_fields(file, node)})
        methods = tuple(
            s.name for s in module_statements(node.body) if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))
        )
        return ClassFact(node.name, module, tuple(fields.values()), methods, tuple(bases), file.span(node), file, node)


def _own_fields(file: SourceFile, node: ast.ClassDef) -> list[FieldFact]:
    init = next((s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"), None)
    if init is not None:
        return _init_parameters(file, init)
    fields = []
    for stmt in module_statements(node.body):
        if not (isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)):
            continue
        annotation = file.segment(stmt.annotation)
        if "ClassVar" in annotation or _not_in_init(stmt.value):
            continue
        default = None if stmt.value is None else file.segment(stmt.value)
        fields.append(FieldFact(stmt.target.id, annotation, default, file.span(stmt)))
    return fields


def _not_in_init(value: ast.expr | None) -> bool:
    """`field(init=False)` is not a constructor argument."""
    return isinstance(value, ast.Call) and any(
        k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False for k in value.keywords
    )


def _init_parameters(file: SourceFile, init: ast.FunctionDef) -> list[FieldFact]:
    args = init.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    defaults.extend(args.defaults)
    pairs = [*zip(positional[1:], defaults[1:], strict=True)]
    pairs.extend(zip(args.kwonlyargs, args.kw_defaults, strict=True))
    return [
        FieldFact(
            a.arg,
            "" if a.annotation is None else file.segment(a.annotation),
            None if d is None else file.segment(d),
            file.span(a),
        )
        for a, d in pairs
    ]
