"""Conditions that only decide in how many pieces the same rows are worked on."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Frame, Tensor
from kvskill.analyzer.modeling.walk import Test
from kvskill.implementer.textops import names_read, statements

__all__ = ["only_chunks"]

_CUTS = frozenset({"chunk", "split", "tensor_split"})


def only_chunks(func: ast.FunctionDef, test: Test) -> bool:
    """`if n > limit: xs = x.chunk(k) else: xs = [x]`, for one or several tensors.

    Both sides bind the same names to lists that hold the rows of the same tensors in the same order. What else one
    side binds (the number of pieces) is not read outside it.
    """
    owner = test.owner
    if not isinstance(owner, ast.If) or not owner.orelse:
        return False
    for cut, whole in ((owner.body, owner.orelse), (owner.orelse, owner.body)):
        pieces, others = _bound(cut), _bound(whole)
        if pieces is None or others is None or not others:
            continue
        same = all(n in pieces and _same_rows(test.frame, pieces[n], others[n]) for n in others)
        extra = {n for n in pieces if n not in others}
        if same and not extra & _read_outside(func, owner):
            return True
    return False


def _bound(body: list[ast.stmt]) -> dict[str, ast.expr] | None:
    """Names and values, where a body is nothing but plain assignments."""
    out: dict[str, ast.expr] = {}
    for stmt in body:
        if not (isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name)):
            return None
        out[stmt.targets[0].id] = stmt.value
    return out


def _same_rows(frame: Frame, pieces: ast.expr, whole: ast.expr) -> bool:
    if not isinstance(whole, (ast.List, ast.Tuple)) or len(whole.elts) != 1:
        return False
    source = _cut_rows(frame, pieces)
    kept = frame.values.get(id(whole.elts[0]))
    return source is not None and source is kept


def _cut_rows(frame: Frame, node: ast.expr) -> Tensor | None:
    """The tensor whose first axis a call cuts into pieces."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _CUTS:
        return None
    args = list(node.args)
    source = frame.values.get(id(node.func.value))
    if not isinstance(source, Tensor):  # torch.chunk(x, n)
        source = frame.values.get(id(args.pop(0))) if args else None
    axis = next((k.value for k in node.keywords if k.arg in ("dim", "axis")), args[1] if len(args) > 1 else None)
    if axis is not None and not (isinstance(axis, ast.Constant) and axis.value == 0):
        return None
    return source if isinstance(source, Tensor) else None


def _read_outside(func: ast.FunctionDef, owner: ast.If) -> set[str]:
    inside = {id(s) for s in statements([owner])} | {id(owner)}
    left = [s for s in statements(func.body) if id(s) not in inside]
    plain = [s for s in left if not isinstance(s, (ast.If, ast.For, ast.While, ast.With, ast.Try))]
    heads: list[ast.AST] = [s.test for s in left if isinstance(s, (ast.If, ast.While))]
    heads += [s.iter for s in left if isinstance(s, ast.For)]
    return names_read([*plain, *heads])
