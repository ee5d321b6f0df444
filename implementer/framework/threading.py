"""Give a function the forward metadata, adding a parameter along the calls that lead to it."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Dict_, Frame
from kvskill.implementer.framework.calls import add_argument, add_parameter
from kvskill.implementer.framework.context import Context

__all__ = ["metadata_in", "thread_metadata"]


def metadata_in(ctx: Context, frame: Frame, at: ast.stmt | None) -> str | None:
    """The expression by which a frame reaches the metadata at a statement, or None."""
    meta = {id(r.meta) for r in (ctx.facts.prefill, ctx.facts.decode) if r is not None}
    env = frame.env_before.get(id(at), frame.env) if at is not None else frame.env
    for name, value in env.items():
        if id(value) in meta:
            return name
    for name, value in env.items():
        if isinstance(value, Dict_) and id(value) not in meta:
            for key, inner in value.items.items():
                if id(inner) in meta and isinstance(key, str):
                    return f'{name}["{key}"]'
    return None


def thread_metadata(ctx: Context, frame: Frame, at: ast.stmt | None = None) -> str | None:
    """Make sure that `frame` has the metadata; returns the expression for it, or None when no caller has it."""
    known = metadata_in(ctx, frame, at)
    if known is not None:
        root = known.split("[")[0]
        if isinstance(frame.func, ast.FunctionDef):
            ctx.use(frame.func, {root})
        return known
    func, parent, call = frame.func, frame.parent, frame.call
    if parent is None or not isinstance(func, ast.FunctionDef) or not isinstance(call, ast.Call):
        return None
    value = thread_metadata(ctx, parent, frame.call_stmt)
    if value is None:
        return None
    name = ctx.fresh_name(func, "forward_metadata")
    add_parameter(ctx, frame.file, func, name)
    add_argument(ctx, parent.file, call, name, value)
    ctx.use(func, {name})
    if isinstance(parent.func, ast.FunctionDef):
        ctx.use(parent.func, {value.split("[")[0]})
    return name
