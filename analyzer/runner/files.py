"""The Python files of a model folder with their functions, and small questions about names in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvskill.diagnostics import InputError
from kvskill.source import SourceFile, read_source

__all__ = ["Function", "folder_files", "functions", "leaf", "own_name"]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a file; `owner` is the class around it."""

    node: ast.FunctionDef
    file: SourceFile
    owner: ast.ClassDef | None


def folder_files(model_dir: Path, root: Path) -> tuple[SourceFile, ...]:
    """All readable Python files of the model folder, links that leave it excluded, in a fixed order."""
    out = []
    inside = model_dir.resolve()
    for path in sorted(model_dir.rglob("*.py")):
        if ".kvskill" in path.parts or inside not in path.resolve().parents:
            continue
        try:
            out.append(read_source(path, path.relative_to(root).as_posix()))
        except InputError:  # the reader of code reports what matters
            continue
    return tuple(out)


def functions(file: SourceFile) -> Iterator[Function]:
    """Every function of the file, methods with their class."""

    def visit(body: list[ast.stmt], owner: ast.ClassDef | None) -> Iterator[Function]:
        for stmt in body:
            if isinstance(stmt, ast.FunctionDef):
                yield Function(stmt, file, owner)
                yield from visit(stmt.body, owner)
            elif isinstance(stmt, ast.ClassDef):
                yield from visit(stmt.body, stmt)
            else:
                for part in ("body", "orelse", "finalbody"):
                    yield from visit(getattr(stmt, part, []), owner)

    yield from visit(file.tree.body, None)


def leaf(node: ast.AST) -> str | None:
    """The last name of `a.b.c`, or the name itself."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def own_name(node: ast.AST) -> str | None:
    """`name` for a plain name and for `self.name`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return node.attr
    return None
