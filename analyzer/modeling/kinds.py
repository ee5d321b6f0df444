"""Which layers run the same code? Equal ones are walked once.

The index of a layer does not count, as long as it only says which cache is the layer's. Where code decides by it (a
comparison, arithmetic, an entry of a table of its own), every layer is a kind of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from kvskill.analyzer.modeling.values import (
    Bool,
    Bound,
    ClassVal,
    Const,
    Dict_,
    External,
    ExtInstance,
    Func,
    Instance,
    ModuleSeq,
    Partial,
    Ref,
    Scalar,
    Tensor,
    Tup,
    Value,
)

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = ["representatives", "row_representatives"]

_DEPTH = 6
_MOST = 64  # entries of a list that are compared
_INDEX_NAMES = ("layer_idx", "layer_id", "idx", "prefix", "layer_index", "index")


def representatives(walk: Walk, items: list[Value], loop: ast.stmt | None = None) -> list[int]:
    """The first of each kind. `loop`: the statement that counts the items, whose body may decide by the number."""
    if not walk.collapse_layers or (loop is not None and _loop_decides(loop)):
        return list(range(len(items)))
    seen: dict[str, int] = {}
    for i, item in enumerate(items):
        seen.setdefault(_signature(walk, item), i)
    return sorted(seen.values())


def row_representatives(walk: Walk, rows: list[tuple[Value, ...]]) -> list[int]:
    """The same for rows of a zip, which differ in all their parts but a number that counts them."""
    if not walk.collapse_layers:
        return list(range(len(rows)))
    seen: dict[str, int] = {}
    for i, row in enumerate(rows):
        parts = [
            _signature(walk, v) for v in row if not (isinstance(v, Const) and v.value is not True and v.value == i)
        ]
        seen.setdefault(" ".join(parts), i)
    return sorted(seen.values())


def _signature(walk: Walk, value: Value, depth: int = 0) -> str:
    """What makes two layers run the same code: classes, settings and functions."""

    def part(v: Value) -> str:
        return _signature(walk, v, depth + 1)

    if isinstance(value, Instance):
        if depth >= _DEPTH:
            return value.cls.name
        parts = [f"{k}={part(v)}" for k, v in sorted(value.attrs.items()) if not _counts_only(walk, value, k, v)]
        return f"{value.cls.name}({','.join(parts)})"
    if isinstance(value, ExtInstance):
        return value.name
    if isinstance(value, ModuleSeq):
        return f"[{len(value.items)}:{','.join(part(v) for v in value.items[:4])}]"
    if isinstance(value, Ref):
        known = walk.concrete(value.path)
        return repr(value) if not isinstance(known, (bool, int, float, str, list, tuple, type(None))) else repr(known)
    if isinstance(value, (Const, Scalar, Bool, External)):
        return repr(value)
    if isinstance(value, Tup):
        return "(" + ",".join(part(v) for v in value.items[:_MOST]) + ")"
    if isinstance(value, Dict_):
        return "{" + ",".join(f"{k!r}:{part(v)}" for k, v in list(value.items.items())[:_MOST]) + "}"
    if isinstance(value, Func):
        return f"function {id(value.node)}"
    if isinstance(value, Bound):
        return f"bound {value.func if isinstance(value.func, str) else id(value.func.node)}"
    if isinstance(value, Partial):
        given = [*value.args, *value.kwargs.values()]
        return f"partial {part(value.func)}({','.join(part(v) for v in given)})"
    if isinstance(value, ClassVal):
        return f"class {value.name}"
    if isinstance(value, Tensor):
        return "T" if value.shape is None else f"T{['?' if d.wild else str(d) for d in value.shape]}"
    return type(value).__name__


def _counts_only(walk: Walk, inst: Instance, name: str, value: Value) -> bool:
    """Is the attribute the layer's number or path, and does no code of the class decide by it?"""
    if not isinstance(value, Const):
        return name in _INDEX_NAMES and not _decided_by(walk, inst.cls, name)
    if isinstance(value.value, str):
        return name in _INDEX_NAMES or "." in value.value
    number = isinstance(value.value, int) and not isinstance(value.value, bool)
    if name in _INDEX_NAMES or (number and value.value == inst.index):
        return not _decided_by(walk, inst.cls, name)
    return False


def _decided_by(walk: Walk, cls: ClassVal, name: str) -> bool:
    """Does a method other than `__init__` do more with `self.name` than hand it on?"""
    key = (id(cls.node), name)
    if key not in walk.deciding:
        walk.deciding[key] = _decides_by(cls, name)
    return walk.deciding[key]


def _decides_by(cls: ClassVal, name: str) -> bool:
    for owner in cls.mro():
        for method in owner.node.body:
            if not isinstance(method, ast.FunctionDef) or method.name == "__init__" or not method.args.args:
                continue
            me = method.args.args[0].arg

            def use(node: ast.AST, me: str = me) -> bool:
                named = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
                return named and isinstance(node.value, ast.Name) and node.value.id == me  # type: ignore[attr-defined]

            if _decides(method.body, use, me):
                return True
    return False


def _loop_decides(loop: ast.stmt) -> bool:
    """Does the body of `for i, layer in enumerate(...)` do more with `i` than hand it on?"""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple) or not loop.target.elts:
        return False
    count = loop.target.elts[0]
    if not isinstance(count, ast.Name):
        return False

    def use(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == count.id and isinstance(node.ctx, ast.Load)

    return _decides(loop.body, use, "self")


def _decides(body: Iterable[ast.stmt], use: Callable[[ast.AST], bool], me: str) -> bool:
    for parent, child in _pairs(body):
        if not use(child):
            continue
        if isinstance(parent, (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.If, ast.While)):
            return True
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.Return, ast.NamedExpr)):
            return True  # where it goes is not followed
        if isinstance(parent, ast.Subscript) and child is parent.slice and _own_table(parent.value, me):
            return True
    return False


def _own_table(base: ast.expr, me: str) -> bool:
    """`self.kinds[i]`, `config.layer_types[i]`: a table of settings. A parameter that layers index is a cache."""
    names = [n.attr for n in ast.walk(base) if isinstance(n, ast.Attribute)]
    root = base
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    if isinstance(root, ast.Name) and root.id == me:
        return not any("cache" in n or "past" in n or "layers" in n for n in names[:1])
    return isinstance(root, ast.Name) and "config" in root.id


def _pairs(body: Iterable[ast.stmt]) -> Iterator[tuple[ast.AST, ast.AST]]:
    for stmt in body:
        for parent in ast.walk(stmt):
            for child in ast.iter_child_nodes(parent):
                yield parent, child
