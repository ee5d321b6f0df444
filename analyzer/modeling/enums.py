"""Enumerations: those of the model's files, and those that they import from the framework."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from kvskill.analyzer.modeling.values import ClassVal, Const, EnumMember
from kvskill.diagnostics import InputError
from kvskill.source import SourceFile, read_source

__all__ = ["ENUM_BASES", "enum_members", "framework_enums", "member_of"]

ENUM_BASES = frozenset({"enum.Enum", "enum.IntEnum", "Enum", "IntEnum"})


def enum_members(cls: ClassVal) -> dict[str, Const]:
    """Members of an enumeration whose values are constants; of an IntEnum the numbers themselves."""
    bases = cls.external_bases() & ENUM_BASES
    if not bases:
        return {}
    number = any(b.endswith("IntEnum") for b in bases)
    out: dict[str, Const] = {}
    for item in cls.node.body:
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            if isinstance(item.value, ast.Constant):
                name, value = item.targets[0].id, item.value.value
                out[name] = Const(value if number else EnumMember(cls.name, name, value))
    return out


def member_of(cls: ClassVal, wanted: Any) -> Const | None:
    """The member that has this value or is it."""
    for member in enum_members(cls).values():
        value = member.value
        if wanted == value or (isinstance(value, EnumMember) and value.value == wanted):
            return member
    return None


def framework_enums(file: SourceFile, root: Path) -> dict[str, ClassVal]:
    """Enumerations that a file imports from modules under `root`, by the name that it gives them.

    Only names whose attributes in capitals the file reads are looked up.
    """
    used = {
        n.value.id
        for n in ast.walk(file.tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.attr.isupper()
    }
    out: dict[str, ClassVal] = {}
    for stmt in file.tree.body:
        if not isinstance(stmt, ast.ImportFrom) or stmt.level or not stmt.module:
            continue
        for alias in stmt.names:
            name = alias.asname or alias.name
            found = _find(root, stmt.module.split("."), alias.name, 0) if name in used else None
            if found is not None:
                out[name] = found
    return out


def _find(root: Path, module: list[str], name: str, depth: int) -> ClassVal | None:
    base = root.joinpath(*module)
    path = next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
    if path is None or depth > 3 or not path.resolve().is_relative_to(root.resolve()):
        return None
    try:
        file = read_source(path, path.relative_to(root).as_posix())
    except InputError:
        return None
    for item in file.tree.body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            bases = tuple(ast.unparse(b) for b in item.bases)
            return ClassVal(name, item, file, bases) if set(bases) & ENUM_BASES else None
        if isinstance(item, ast.ImportFrom) and any((a.asname or a.name) == name for a in item.names):
            inner = next(a.name for a in item.names if (a.asname or a.name) == name)
            package = module if path.name == "__init__.py" else module[:-1]
            up = package[: len(package) - (item.level - 1)] if item.level else []
            return _find(root, [*up, *(item.module or "").split(".")], inner, depth + 1)
    return None
