"""Names that an edit must not leave unbound, and definitions that it leaves unused."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator

__all__ = ["first_use", "unbound_names", "unused_since"]


def unbound_names(text: str, shown: str) -> set[str]:
    """Names that a file reads and neither binds at module level nor has as builtins.

    Raises SyntaxError. A name that `from x import *` may bind counts as unbound: compare two versions of one file.
    """
    table = symtable.symtable(text, shown, "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    bound |= {name for scope in _scopes(table) for name in _global_targets(scope)}
    read = {
        s.get_name()
        for scope in _scopes(table)
        for s in scope.get_symbols()
        if s.is_referenced() and (s.is_global() or scope is table)
    }
    return read - bound - set(dir(builtins)) - {"__file__", "__name__", "__doc__", "__class__"}


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _global_targets(scope: symtable.SymbolTable) -> set[str]:
    return {s.get_name() for s in scope.get_symbols() if s.is_declared_global() and s.is_assigned()}


def first_use(tree: ast.AST, name: str) -> ast.AST | None:
    """The first place that reads a name."""
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    return min(uses, key=lambda n: (n.lineno, n.col_offset), default=None)


Definition = ast.FunctionDef | ast.ClassDef


def unused_since(old: Iterable[ast.Module], new: Iterable[ast.Module]) -> list[Definition]:
    """Definitions of `new` that something in `old` names and nothing in `new` does but other such definitions, in
    source order.

    By name only: a method counts as used while any attribute of its name is read.
    """
    before, new = _names_used(old), list(new)
    found = [n for tree in new for n in ast.walk(tree) if isinstance(n, Definition) and n.name in before]
    unused: list[Definition] = []
    while True:
        after = _names_used(new, unused)
        more = [n for n in found if n.name not in after and n not in unused]
        if not more:
            return [n for n in found if n in unused]
        unused += more


def _names_used(trees: Iterable[ast.Module], without: Iterable[Definition] = ()) -> set[str]:
    """Names that the trees read, `without` the bodies of some definitions."""
    left = {id(n) for d in without for n in ast.walk(d)}
    out: set[str] = set()
    for node in (n for tree in trees for n in ast.walk(tree) if id(n) not in left):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            out.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            out.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.add(node.value)  # getattr(self, "name"), __all__
    return out
