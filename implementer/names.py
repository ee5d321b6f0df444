"""Names that nothing in a file binds: what an edit must not add."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

__all__ = ["first_use", "unbound_names"]


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
