"""Where a loop takes the token of prefill: each row's last one, from the logits of all columns.

Every read of the logits is looked at: the last column (or each row's last real one) is picked by the step's metadata,
other columns stay, and a read that is not understood is a doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kvskill.analyzer.runner.files import leaf, own_name
from kvskill.analyzer.runner.walkrun import CACHES
from kvskill.implementer.standalone.flow import Flow
from kvskill.implementer.standalone.formulas import Arange, Num, num
from kvskill.implementer.standalone.places import is_log
from kvskill.implementer.standalone.proof import Doubt
from kvskill.implementer.textops import blocks_in, statements

__all__ = ["Pick", "find_picks"]

_SAME_ROWS = ("float", "to", "cpu", "softmax", "log_softmax", "argmax", "div", "detach", "clone", "contiguous")
_FACTS = ("shape", "dtype", "device", "size", "dim", "ndim")
_TODO = "Take each row's last token by `[:, -1]`, or leave this read out."


@dataclass(frozen=True, eq=False)
class Pick:
    """`node` takes the last token of each row from `source`; `keeps_axis`: with an axis of one column."""

    node: ast.expr
    source: ast.expr
    keeps_axis: bool


def find_picks(
    func: ast.FunctionDef, prefill: ast.stmt, decode: ast.stmt, around: ast.stmt, flow: Flow
) -> list[Pick] | Doubt:
    """The picks from the result of the statement `prefill`; empty where there is none.

    `decode` is the statement of the decode call, in the loop `around`.
    """
    names = _results(func, prefill, decode)
    rebound = {n for t in getattr(decode, "targets", []) if (n := own_name(t)) is not None}
    kept = {n.id for n in ast.walk(around) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    picks: list[Pick] = []
    doubts: list[Doubt] = []
    for stmt in statements(func.body):
        ahead = prefill.lineno < stmt.lineno < decode.lineno
        behind = stmt.lineno > (around.end_lineno or 0)
        if not ahead and not behind and not (stmt.lineno > decode.lineno and names - kept):
            continue
        for node, parents in _maximal(stmt, names):
            found = _read(node, parents, stmt, flow)
            if isinstance(found, Pick) and (ahead or behind):
                picks.append(found)
            elif found is not None and (ahead or not _roots(node) & (rebound if behind else kept)):
                doubts.append(found if isinstance(found, Doubt) else Doubt(found.node, "a token is picked late", _TODO))
    return doubts[0] if picks and doubts else picks


def _results(func: ast.FunctionDef, prefill: ast.stmt, decode: ast.stmt) -> set[str]:
    """Names that hold the prefill call's result or logits [B, S, ..] made of it."""
    names = {n for t in getattr(prefill, "targets", []) if (n := own_name(t)) is not None}
    between = [s for s in statements(func.body) if prefill.lineno <= s.lineno < decode.lineno]
    for _ in range(4):
        for s in between:
            if isinstance(s, ast.Assign) and _is_result(s.value, names):
                names |= {n for t in s.targets if (n := own_name(t)) is not None}
    return names


def _maximal(stmt: ast.stmt, names: set[str]) -> Iterator[tuple[ast.expr, list[ast.AST]]]:
    """Results read by the statement itself that are no part of a larger one, with the nodes around them."""
    inner = {id(b) for block in blocks_in(stmt) for b in block}
    todo: list[tuple[ast.AST, list[ast.AST]]] = [(stmt, [])]
    while todo:
        node, above = todo.pop()
        if isinstance(node, ast.expr) and _is_result(node, names):
            if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                yield node, above
            continue
        todo += [(c, [node, *above]) for c in ast.iter_child_nodes(node) if id(c) not in inner]


def _roots(node: ast.expr) -> set[str]:
    return {name for n in ast.walk(node) if (name := own_name(n)) is not None}


def _read(node: ast.expr, above: list[ast.AST], stmt: ast.stmt, flow: Flow) -> Pick | Doubt | None:
    """What is done with the logits: a pick, something that stays right (None), or a doubt."""
    around = above[0]
    outer = above[1] if len(above) > 1 else None
    doubt = Doubt(node, "the logits of prefill are read here otherwise than for each row's last token", _TODO)
    if isinstance(around, ast.Assign) and around.value is node:
        return None if all(own_name(t) is not None for t in around.targets) else doubt
    if isinstance(around, ast.Subscript) and around.value is node:
        return _indexed(around, node, stmt, flow) or (None if _other_columns(around.slice) else doubt)
    if isinstance(around, ast.Attribute):
        if around.attr == "select" and isinstance(outer, ast.Call) and outer.func is around and len(outer.args) == 2:
            axis, at = outer.args
            if ast.unparse(axis) in ("1", "-2") and _is_last(at, stmt, flow):
                return Pick(outer, node, False)
        return None if around.attr in (*_FACTS, *CACHES) else doubt
    if isinstance(around, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in around.ops):
        return None
    return None if isinstance(stmt, ast.Expr) and is_log(stmt.value) else doubt


def _indexed(sub: ast.Subscript, source: ast.expr, stmt: ast.stmt, flow: Flow) -> Pick | None:
    """`[:, -1]`, `[:, -1:]`, `[:, length - 1]` and `[arange(rows), lengths - 1]`, all with or without a third `:`."""
    index = sub.slice
    if not isinstance(index, ast.Tuple) or len(index.elts) not in (2, 3) or not all(map(_everything, index.elts[2:])):
        return None
    rows, column = index.elts[:2]
    if _everything(rows):
        if isinstance(column, ast.Slice):
            last = column.lower is not None and not column.upper and not column.step
            return Pick(sub, source, True) if last and _is_last(column.lower, stmt, flow) else None
        return Pick(sub, source, False) if _is_last(column, stmt, flow) else None
    counted = [isinstance(v, Arange) and v.start.same(num()) and v.stop is not None and v.stop.same(num(B=1))
               for v in flow.values(stmt, rows)]
    if not counted or not all(counted):
        return None
    own = [isinstance(v, Num) and v.same(num(-1, L=1)) for v in flow.values(stmt, column)]
    return Pick(sub, source, False) if all(own) or _is_last(column, stmt, flow) else None


def _is_last(at: ast.expr | None, stmt: ast.stmt, flow: Flow) -> bool:
    """-1, or the number of columns less one."""
    if at is not None and ast.unparse(at) == "-1":
        return True
    seen = flow.values(stmt, at) if at is not None else []
    return bool(seen) and all(isinstance(v, Num) and v.same(num(-1, P=1)) for v in seen)


def _other_columns(index: ast.expr) -> bool:
    """`[:, a:b]` with an end: columns as they are."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    return len(parts) > 1 and _everything(parts[0]) and isinstance(parts[1], ast.Slice) and _before_last(parts[1])


def _before_last(part: ast.Slice) -> bool:
    """It ends before the last column, or begins with the first and takes some."""
    low = part.lower is None or isinstance(part.lower, ast.Constant)
    return low and part.upper is not None and ast.unparse(part.upper).startswith("-")


def _everything(e: ast.expr) -> bool:
    return isinstance(e, ast.Slice) and e.lower is None and e.upper is None and e.step is None


def _is_result(value: ast.expr, names: set[str]) -> bool:
    """A name of the result, a field or item of it, or an operation that keeps its rows and columns."""
    if own_name(value) in names:
        return True
    if isinstance(value, ast.Attribute):
        return value.attr not in (*_FACTS, *CACHES) and _is_result(value.value, names) and _is_field(value.attr)
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and _is_result(value.value, names)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Div, ast.Mult)):
        return _is_result(value.left, names)
    if isinstance(value, ast.Call) and leaf(value.func) in _SAME_ROWS and not _keeps_dim(value):
        inner = value.func.value if isinstance(value.func, ast.Attribute) else None
        if inner is not None and leaf(inner) not in ("torch", "F", "functional"):
            return _is_result(inner, names)
        return bool(value.args) and _is_result(value.args[0], names)
    return False


def _is_field(name: str) -> bool:
    """No method of a tensor: what is called on the logits is looked at by itself."""
    return "logits" in name or name in ("data", "last_hidden_state", "output", "outputs")


def _keeps_dim(call: ast.Call) -> bool:
    """An argmax that is not over the last axis (or keeps it) leaves other axes than [B, S]."""
    if leaf(call.func) != "argmax":
        return False
    given = [k.value for k in call.keywords if k.arg == "dim"] or call.args[-1:]
    last = bool(given) and ast.unparse(given[0]) == "-1"
    return not last or any(k.arg == "keepdim" for k in call.keywords)
