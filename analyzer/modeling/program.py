"""The files of a model folder as one program: which names each file binds, and which class is the entry."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvskill.analyzer.modeling import builtins as py
from kvskill.analyzer.modeling.enums import framework_enums
from kvskill.analyzer.modeling.values import ClassVal, Const, Dict_, External, Func, Tup, Value
from kvskill.source import SourceFile, read_source

__all__ = ["Program", "bind_files", "load_program", "source_files"]


@dataclass(frozen=True)
class Program:
    """All files, by shown path, with the names that they bind at module level."""

    files: dict[str, SourceFile]
    modules: dict[str, dict[str, Value]]
    root: Path | None = None  # where the framework's own modules are

    def classes(self) -> list[ClassVal]:
        """Classes in file order, each once."""
        out: list[ClassVal] = []
        for shown, names in self.modules.items():
            out.extend(v for v in names.values() if isinstance(v, ClassVal) and v.file.shown == shown)
        return out

    def find(self, name: str) -> ClassVal | None:
        return next((c for c in self.classes() if c.name == name), None)


def source_files(folder: Path) -> list[Path]:
    """The model's own Python files: `models/` when there is one, else the folder; links out of it are not followed."""
    root = folder / "models" if (folder / "models").is_dir() else folder
    inside = folder.resolve()
    out = []
    for path in sorted(root.rglob("*.py")):
        if any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts):
            continue
        if path.resolve().is_relative_to(inside):
            out.append(path)
    return out


def load_program(paths: Iterable[Path], shown_root: Path) -> Program:
    """Read and bind the files. Raises InputError for a file that cannot be parsed."""
    files: dict[str, SourceFile] = {}
    for path in paths:
        shown = path.relative_to(shown_root).as_posix() if path.is_relative_to(shown_root) else path.name
        files[shown] = read_source(path, shown)
    return bind_files(files, shown_root)


def bind_files(files: dict[str, SourceFile], root: Path | None = None) -> Program:
    """Bind the names of files that are already parsed; `root`: where the framework's own modules are."""
    modules: dict[str, dict[str, Value]] = {shown: {} for shown in files}
    # files that others import come first; two rounds settle mutual imports
    for _ in range(2):
        for shown, file in files.items():
            _bind_module(file, modules[shown], modules)
    if root is not None:
        for shown, file in files.items():
            modules[shown].update(framework_enums(file, root))
    return Program(files, modules, root)


def _bind_module(file: SourceFile, env: dict[str, Value], modules: dict[str, dict[str, Value]]) -> None:
    for stmt in _toplevel(file.tree.body):
        if isinstance(stmt, (ast.Import, ast.ImportFrom)):
            py.bind_import(stmt, env, modules, file)
        elif isinstance(stmt, ast.ClassDef):
            bases = tuple(_base(b, env) for b in stmt.bases)
            old = env.get(stmt.name)
            if not (isinstance(old, ClassVal) and old.node is stmt and old.bases == bases):
                env[stmt.name] = ClassVal(stmt.name, stmt, file, bases)
        elif isinstance(stmt, ast.FunctionDef):
            old = env.get(stmt.name)
            if not (isinstance(old, Func) and old.node is stmt):
                env[stmt.name] = Func(stmt, file)
        elif isinstance(stmt, (ast.Assign, ast.AnnAssign)) and stmt.value is not None:
            target = stmt.targets[0] if isinstance(stmt, ast.Assign) else stmt.target
            value = _module_value(stmt.value, env)
            if value is not None and isinstance(target, ast.Name):
                env[target.id] = value


def _toplevel(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    for stmt in body:
        yield stmt
        if isinstance(stmt, ast.Try):
            yield from _toplevel(stmt.body)
        elif isinstance(stmt, ast.If):
            yield from _toplevel(stmt.body)
            yield from _toplevel(stmt.orelse)


def _base(node: ast.expr, env: dict[str, Value]) -> ClassVal | str:
    value = _module_value(node, env)
    if isinstance(value, ClassVal):
        return value
    if isinstance(value, External):
        return value.name
    return ast.unparse(node)


def _module_value(node: ast.expr, env: dict[str, Value]) -> Value | None:
    if isinstance(node, ast.Constant):
        return Const(node.value)
    if isinstance(node, ast.Name):
        return env.get(node.id)
    if isinstance(node, ast.Dict):
        items = {}
        for key, val in zip(node.keys, node.values, strict=True):
            value = _module_value(val, env)
            if not isinstance(key, ast.Constant) or value is None:
                return None
            items[key.value] = value
        return Dict_(items)
    if isinstance(node, (ast.Tuple, ast.List)):
        parts = [_module_value(e, env) for e in node.elts]
        return Tup([p for p in parts if p is not None], isinstance(node, ast.List)) if all(parts) else None
    if isinstance(node, ast.Attribute):
        base = _module_value(node.value, env)
        return External(f"{base.name}.{node.attr}") if isinstance(base, External) else None
    return None
