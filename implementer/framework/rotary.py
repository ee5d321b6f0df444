"""Rotary tables that were read by count: a slice of the first S rows, or rows picked by kv_len.

Packed tokens have their own positions: the rows are picked by position_ids.
"""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.trace import ancestors, root_of
from kvskill.analyzer.modeling.values import Const, Frame, Func, Scalar, Tensor, Unknown, Value
from kvskill.analyzer.modeling.walk import Test
from kvskill.implementer.framework.calls import add_argument, add_parameter
from kvskill.implementer.framework.container import Containers
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import names_read, replace_expr, statements

__all__ = ["convert_rotary"]


def convert_rotary(ctx: Context, containers: Containers) -> None:
    """Find tables sliced by a token count and read them by position instead."""
    run = ctx.facts.prefill
    assert run is not None
    done: set[int] = set()
    for t in run.walk.tensors:
        if not _by_count(t) or t.frame is None or id(t.node) in done:
            continue
        if not _feeds_attention(ctx, t):
            continue
        done.add(id(t.node))
        _by_position(ctx, containers, t, t.frame)
    for t in run.walk.tensors:
        if _by_length(t) and t.frame is not None and id(t.node) not in done and _feeds_attention(ctx, t):
            done.add(id(t.node))
            _as_decode(ctx, t, t.frame)


def _by_count(t: Tensor) -> bool:
    """`table[:seq_len]`: rows by count from a table that is not the input."""
    if t.op != "getitem" or not isinstance(t.node, ast.Subscript) or t.stream or not t.shape or not t.parents:
        return False
    table = t.parents[0]
    if not isinstance(table, Tensor) or any(
        a.op.startswith("input:") or a.op == "cache" or a.stream for a in ancestors([table])
    ):
        return False
    parts = t.attrs.get("parts") or []
    return bool(parts) and isinstance(parts[0], slice) and any(a in ("S", "B") for a in t.shape[0].atoms)


def _by_length(t: Tensor) -> bool:
    """`table[:length]` with a length read from a tensor or a loop: rows counted request by request."""
    if t.op != "getitem" or not isinstance(t.node, ast.Subscript) or t.stream or not t.parents:
        return False
    table = t.parents[0]
    if not isinstance(table, Tensor) or any(a.op.startswith("input:") or a.stream for a in ancestors([table])):
        return False
    parts = t.attrs.get("parts") or []
    if not parts or not isinstance(parts[0], slice) or parts[0].stop is None:
        return False
    stop = parts[0].stop
    return isinstance(stop, (Unknown, Tensor)) or (isinstance(stop, Scalar) and (stop.dim is None or stop.dim.wild))


def _as_decode(ctx: Context, t: Tensor, frame: Frame) -> None:
    """Rows by request in prefill, by position in decode: both phases read by position as decode does."""
    func = frame.func
    branch = _phase_branch(ctx, frame, t.node) if t.node is not None else None
    if not isinstance(func, ast.FunctionDef) or branch is None:
        _refuse(ctx, t, frame)
        return
    test, in_body = branch
    if id(test) in ctx.dropped_args:
        return  # its sibling (sine beside cosine) was here
    late = test.orelse if in_body else test.body
    nodes = {id(n) for s in late for n in ast.walk(s)}
    decode = ctx.facts.decode
    assert decode is not None
    reads = [x for x in decode.walk.tensors if x.frame is not None and x.frame.func is func and id(x.node) in nodes]
    picked = {id(n): n for x in reads if (n := _index_node(x)) is not None}
    name = _positions_of(ctx, func)
    if not picked or name is None:
        _refuse(ctx, t, frame)
        return
    for node in picked.values():
        replace_expr(ctx.edit_set(frame.file), node, f"{name}.view(-1)", "rows by position")
        ctx.freed.setdefault(id(func), set()).update(names_read([node]))
        ctx.dropped_args.add(id(node))
    ctx.use(func, {name})
    _keep_side(ctx, frame, test, not in_body)


def _index_node(t: Tensor) -> ast.expr | None:
    """The expression of the positions by which a table's rows are picked."""
    if t.op == "index_select" and isinstance(t.node, ast.Call) and len(t.parents) > 1:
        given = [k.value for k in t.node.keywords if k.arg == "index"] or t.node.args[-1:]
        root = root_of(t.parents[-1])
        return given[0] if given and root is not None and root.op == "input:position_ids" else None
    if t.op == "getitem" and isinstance(t.node, ast.Subscript) and len(t.parents) == 2:
        root = root_of(t.parents[1])
        return t.node.slice if root is not None and root.op == "input:position_ids" else None
    return None


def _refuse(ctx: Context, t: Tensor, frame: Frame) -> None:
    ctx.refuse(
        frame.file,
        t.node or frame.file.tree,
        "KV215",
        "A rotary table is read by token count, and position_ids do not reach this function.",
        "Pick the rows by position_ids.",
    )


def _feeds_attention(ctx: Context, t: Tensor) -> bool:
    run = ctx.facts.prefill
    assert run is not None
    from kvskill.analyzer.modeling.scores import find_attends

    return any(t in ancestors([a.q, a.k]) for a in find_attends(run.walk))


def _by_position(ctx: Context, containers: Containers, t: Tensor, frame: Frame) -> None:
    func, node = frame.func, t.node
    assert isinstance(node, ast.Subscript)
    if not isinstance(func, ast.FunctionDef):
        return
    name = _positions_of(ctx, func)
    if name is None:
        _refuse(ctx, t, frame)
        return
    file = frame.file
    base = file.segment(node.value)
    replace_expr(ctx.edit_set(file), node, f"{base}[{name}.view(-1)]", "rows by position")
    ctx.use(func, {name})
    branch = _phase_branch(ctx, frame, node)
    if branch is not None:
        _keep_side(ctx, frame, *branch)


def _positions_of(ctx: Context, func: ast.FunctionDef) -> str | None:
    """The name of position_ids in a function, passed on along every chain of calls that leads there in prefill."""
    run = ctx.facts.prefill
    assert run is not None
    names = {_positions(ctx, f) for f in ctx.frames_of(func) if f in run.walk.frames}
    return next(iter(names)) if len(names) == 1 else None


def _positions(ctx: Context, frame: Frame) -> str | None:
    """The name of position_ids in a frame, passed on along the calls where it is missing."""
    if not isinstance(frame.func, ast.FunctionDef):
        return None
    known = _bound_positions(frame, frame.func.body[0])
    if known is not None:
        return known
    return _thread_positions(ctx, frame)


def _bound_positions(frame: Frame, at: ast.stmt | None) -> str | None:
    """A name that holds the positions themselves (rearranged at most) at a statement."""
    env = frame.env_before.get(id(at), frame.env) if at is not None else frame.env
    for name, value in env.items():
        if isinstance(value, Tensor) and root_of(value) is not None:
            root = root_of(value)
            if root is not None and root.op == "input:position_ids":
                return name
    return None


def _thread_positions(ctx: Context, frame: Frame) -> str | None:
    parent, call, func = frame.parent, frame.call, frame.func
    if parent is None or not isinstance(call, ast.Call) or not isinstance(func, ast.FunctionDef):
        return None
    source = _bound_positions(parent, frame.call_stmt) or _thread_positions(ctx, parent)
    if source is None:
        return None
    name = ctx.fresh_name(func, "position_ids")
    add_parameter(ctx, frame.file, func, name)
    add_argument(ctx, parent.file, call, name, source)
    ctx.use(func, {name})
    if isinstance(parent.func, ast.FunctionDef):
        ctx.use_at(parent.func, call.lineno, {source})
    return name


def _phase_branch(ctx: Context, frame: Frame, node: ast.AST) -> tuple[ast.If, bool] | None:
    """The phase test around the read, and whether its body (not its else) is prefill."""
    run = ctx.facts.prefill
    assert run is not None
    for test in run.walk.tests:
        phase = "S" in test.axes or (test.value == Const(True) and _decode_value(ctx, test) == Const(False))
        if test.frame.func is frame.func and isinstance(test.owner, ast.If) and phase:
            if any(n is node for s in test.owner.body for n in ast.walk(s)):
                return test.owner, True
            if any(n is node for s in test.owner.orelse for n in ast.walk(s)):
                return test.owner, False
    return None


def _decode_value(ctx: Context, test: Test) -> Value | None:
    """What the same condition gives in decode."""
    run = ctx.facts.decode
    assert run is not None
    return next((t.value for t in run.walk.tests if t.node is test.node), None)


def _keep_side(ctx: Context, frame: Frame, branch: ast.If, in_body: bool) -> None:
    """Both phases now read by position: one side stays (the body with `in_body`), the test and the other side go."""
    func, file = frame.func, frame.file
    assert isinstance(func, ast.FunctionDef)
    kept, gone = (branch.body, branch.orelse) if in_body else (branch.orelse, branch.body)
    key = id(branch)
    if key in ctx.dropped_args:
        return
    ctx.dropped_args.add(key)
    edits = ctx.edit_set(file)
    start = file.line_starts[branch.lineno - 1]
    first_line = file.line_starts[kept[0].lineno - 1]
    # comments between the head and the first kept statement stay
    head_end = first_line
    last = kept[-1].end_lineno or kept[-1].lineno
    tail_start = file.line_starts[last] if last < len(file.line_starts) else len(file.raw)
    end_line = branch.end_lineno or branch.lineno
    tail_end = file.line_starts[end_line] if end_line < len(file.line_starts) else len(file.raw)
    edits.add(start, head_end, "", "one path for both phases")
    if tail_end > tail_start:
        edits.add(tail_start, tail_end, "", "one path for both phases")
    unit = ctx.unit(func, file)
    for line in range(kept[0].lineno, last + 1):
        at = file.line_starts[line - 1]
        if file.raw[at : at + len(unit)] == unit.encode():
            edits.add(at, at + len(unit), "", "one path for both phases")
    ctx.functions.setdefault(id(func), Func(func, file, frame.owner))
    freed = names_read([*gone, branch.test])
    ctx.freed.setdefault(id(func), set()).update(freed)
    ctx.removed.setdefault(id(func), set())
    ctx.rewritten.setdefault(id(func), set()).update(s for s in statements(gone))
    ctx.rewritten_tests.add(id(branch.test))
