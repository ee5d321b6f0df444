"""Counts of requests that code below the containers folds tokens by: there the packed tokens are one row."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.values import Frame, Ref, Scalar, Tensor, Value
from kvskill.implementer.framework.container import Containers
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import replace_expr, whole_removal

__all__ = ["convert_row_counts"]


def convert_row_counts(ctx: Context, containers: Containers) -> None:
    """Replace `actual_seq_lengths_q.shape[0]`, `self.batch_size` and the like by 1 in attention and block code."""
    run = ctx.facts.prefill
    assert run is not None
    above = {id(f.func) for f in containers.frames}
    done: set[int] = set()
    for frame in run.walk.frames:
        func = frame.func
        if not isinstance(func, ast.FunctionDef) or id(func) in above or frame.parent is None:
            continue
        gone = {id(n) for s in whole_removal(func.body, ctx.removed.get(id(func), set())) for n in ast.walk(s)}
        gone |= {id(n) for d in ast.walk(func) if id(d) in ctx.dropped_args for n in ast.walk(d)}
        for node in ast.walk(func):
            if id(node) in gone or id(node) in done or not isinstance(node, ast.expr):
                continue
            if _counts_requests(run.walk.dim_alias, frame, node):
                done.add(id(node))
                done.update(id(n) for n in ast.walk(node))
                replace_expr(ctx.edit_set(frame.file), node, "1", "packed tokens are one row here")


def _counts_requests(aliases: dict[str, Dim], frame: Frame, node: ast.expr) -> bool:
    value = frame.values.get(id(node))
    rows = Dim.atom("B")
    if isinstance(node, ast.Attribute) and isinstance(value, Ref):
        return isinstance(node.ctx, ast.Load) and aliases.get(value.path) == rows
    if not _is(value, rows, aliases):
        return False
    if isinstance(node, ast.Subscript):
        return _of_metadata(frame, node.value)
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "size":
            return _metadata(frame.values.get(id(func.value)))
        return isinstance(func, ast.Name) and func.id in ("len", "int")
    return False


def _is(value: Value | None, rows: Dim, aliases: dict[str, Dim]) -> bool:
    if not isinstance(value, Scalar) or value.dim is None:
        return False
    if value.dim == rows:
        return True
    return len(value.dim.atoms) == 1 and aliases.get(next(iter(value.dim.atoms))) == rows


def _of_metadata(frame: Frame, node: ast.expr) -> bool:
    """`X.shape` or `X.size()` of a metadata tensor."""
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return _metadata(frame.values.get(id(node.value)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return _metadata(frame.values.get(id(node.func.value)))
    return False


def _metadata(value: Value | None) -> bool:
    return (
        isinstance(value, Tensor)
        and value.op.startswith("input:")
        and value.op not in ("input:input_ids", "input:position_ids")
    )
