"""Blocks that hidden states pass through on their way (MLP, MoE, norms, rotary tables).

A block that works on [T, H] as it is stays as it is; one that unpacks [B, S, H] sees the packed tokens as one row.
A test on the number of tokens that told prefill from decode becomes a test of the phase.
"""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.dims import Dim, const, same
from kvskill.analyzer.modeling.values import Bool, Const, Frame, Func, Instance, Scalar, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import RUNTIME, Test, Walk
from kvskill.implementer.framework.attention import adapt_block
from kvskill.implementer.framework.chunks import only_chunks
from kvskill.implementer.framework.container import Containers
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.threading import metadata_in, thread_metadata
from kvskill.implementer.textops import replace_expr, statements, whole_removal

__all__ = ["convert_blocks", "convert_phase_tests"]


def convert_blocks(ctx: Context, containers: Containers, skip: set[int]) -> None:
    """Adapt the blocks that need three axes. `skip` holds ids of frames' functions handled elsewhere."""
    run = ctx.facts.prefill
    assert run is not None
    above = {id(f) for f in containers.frames}
    entries = {id(a.entry) for a in ctx.facts.attentions}
    seen: set[int] = set()
    for frame in run.walk.frames:
        if not isinstance(frame.self_, Instance) or not isinstance(frame.func, ast.FunctionDef):
            continue
        if id(frame.parent) not in above or id(frame) in above or id(frame.func) in entries | skip:
            continue
        if frame.func.name == "__init__" or id(frame.func) in seen:
            continue
        params = _stream_params(frame)
        if not params:
            continue
        if _agnostic(run.walk, frame, params):
            continue
        seen.add(id(frame.func))
        adapt_block(ctx, Func(frame.func, frame.file, frame.owner), params, ())


def _arguments(frame: Frame) -> dict[str, Value]:
    func = frame.func
    assert isinstance(func, ast.FunctionDef)
    env = frame.env_before.get(id(func.body[0]), {})
    names = [a.arg for a in [*func.args.posonlyargs, *func.args.args, *func.args.kwonlyargs]]
    out = {n: env[n] for n in names if n in env}
    if func.args.vararg is not None and isinstance(extra := env.get(func.args.vararg.arg), Tup):
        out.update({f"*{i}": v for i, v in enumerate(extra.items)})
    return out


def _stream_params(frame: Frame) -> tuple[str, ...]:
    return tuple(
        n for n, v in _arguments(frame).items() if isinstance(v, Tensor) and v.stream and v.rank == 3 and n[0] != "*"
    )


def _agnostic(walk: Walk, frame: Frame, params: tuple[str, ...]) -> bool:
    """Does the block work on [T, H] and give [T, H]? Tried on a walk of its own."""
    trial = Walk(walk.modules, walk.concrete, dict(walk.dim_env), dict(walk.dim_alias))
    trial.hooks.update(walk.hooks)
    trial.collapse_layers = True
    trial.frame = Frame(None, frame.file, None, {}, None, None)
    func = frame.func
    assert isinstance(func, ast.FunctionDef)
    args = _arguments(frame)
    flat = Dim.atom("T")

    def packed(value: Value) -> Value:
        if isinstance(value, Tup):
            return Tup([packed(v) for v in value.items], value.is_list)
        if not isinstance(value, Tensor) or value.shape is None:
            return value
        if value.stream and len(value.shape) == 3:
            return trial.tensor("embedding", [], (flat, value.shape[2]), None)
        if value.op == "input:input_ids":
            return trial.tensor(value.op, [], (flat,), None)
        return trial.tensor(value.op, [], as_one_row(value.shape), None)

    given = {n: packed(v) for n, v in args.items() if n[0] != "*"}
    extra = [packed(v) for n, v in args.items() if n[0] == "*"]
    positional = [a.arg for a in [*func.args.posonlyargs, *func.args.args]]
    values = [given.pop(n) for n in positional if n in given]
    result = trial.call_func(Func(func, frame.file, frame.owner), [*values, *extra], given, None)
    if trial.problems:
        return False
    return all(_as_expected(legacy, result) for _, legacy in frame.returns)


def as_one_row(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The Legacy shape with one row of T tokens for [B, S]."""
    return tuple(_put(d) for d in shape)


def _put(dim: Dim) -> Dim:
    out = const(0)
    for mono, coef in dim.terms:
        term = const(coef)
        for name, power in mono:
            unit = const(1) if name == "B" else Dim.atom("T" if name == "S" else name)
            for _ in range(power):
                term = term * unit
        out = out + term
    return out


def _as_expected(legacy: Value, now: Value) -> bool:
    """Hidden states lost their row axis, everything else is what one row of T tokens gives."""
    if isinstance(legacy, Tup):
        if not isinstance(now, Tup) or len(now.items) != len(legacy.items):
            return False
        return all(_as_expected(a, b) for a, b in zip(legacy.items, now.items, strict=True))
    if not isinstance(legacy, Tensor) or legacy.shape is None:
        return True
    if not isinstance(now, Tensor) or now.shape is None:
        return not legacy.stream
    want = as_one_row(legacy.shape)
    if legacy.stream and len(want) == 3:
        return len(now.shape) == 2
    return len(now.shape) == len(want) and all(same(a, b) for a, b in zip(now.shape, want, strict=True))


def convert_phase_tests(ctx: Context, containers: Containers) -> None:
    """Rewrite conditions on token counts that tell the phases apart; refuse the others.

    A block below the containers that asks only how many tokens there are stays: with one request it saw any count.
    """
    prefill, decode = ctx.facts.prefill, ctx.facts.decode
    assert prefill is not None and decode is not None
    other = {id(t.node): t for t in decode.walk.tests}
    done: set[int] = set()
    for test in prefill.walk.tests:
        func = test.frame.func
        if not test.axes or id(test.node) in done or not isinstance(func, ast.FunctionDef):
            continue
        if _removed(ctx, func, test.node) or id(test.node) in ctx.rewritten_tests:
            continue
        done.add(id(test.node))
        if id(func) not in containers.functions and _any_count(test, Dim.atom("B") * Dim.atom("S")):
            twin = other.get(id(test.node))
            if twin is None or _any_count(twin, Dim.atom("B")):
                continue
        _rewrite_test(ctx, test, other.get(id(test.node)), func)


def _removed(ctx: Context, func: ast.FunctionDef, node: ast.AST) -> bool:
    stmts = whole_removal(func.body, ctx.removed.get(id(func), set()))
    return any(node is n for s in stmts for n in ast.walk(s))


def _rewrite_test(ctx: Context, test: Test, twin: Test | None, func: ast.FunctionDef) -> None:
    file = test.frame.file
    known = test.value.value if isinstance(test.value, Const) else None
    late = twin.value.value if twin is not None and isinstance(twin.value, Const) else None
    phase = isinstance(known, bool) and isinstance(late, bool) and known is not late
    if phase and _counts_tokens(test):
        stmt = next((s for s in statements(func.body) if any(n is test.node for n in ast.walk(s))), None)
        meta = metadata_in(ctx, test.frame, None) or thread_metadata(ctx, test.frame, stmt)
        if meta is not None:
            text = f"{meta}.is_prefill" if known else f"not {meta}.is_prefill"
            replace_expr(ctx.edit_set(file), test.node, text, "the phase decides, not a token count")
            ctx.use(func, {meta.split("[")[0]})
            return
    if _raises(test) and isinstance(test.owner, (ast.If, ast.Assert)) and _counts_rows(ctx, test):
        # it guards the fold of tokens by requests, which is gone
        ctx.mark_removed(Func(func, file, test.frame.owner), {test.owner})
        return
    if isinstance(test.value, Const) and twin is not None and test.value == twin.value and not _raises(test):
        # the same side in both phases: it depends on the batch only in theory
        if known is not None and "S" not in test.axes:
            return
    if only_chunks(func, test):
        return  # the same rows in one piece or in several
    if _raises(test) or (isinstance(test.value, Bool) and test.axes <= {"B"} and _one_request(test)):
        return  # a shortcut for one request: both sides were walked and agree
    ctx.refuse(
        file,
        test.node,
        "KV213",
        "A condition depends on the number of requests or tokens in a way that is not a phase test.",
        "Decide by forward_metadata.is_prefill, or make the code independent of the count.",
    )


def _any_count(test: Test, tokens: Dim) -> bool:
    """Is the answer open, and does it depend on B and S by the number of tokens alone?"""
    if not isinstance(test.value, Bool) or not test.operands:
        return False
    for value in test.operands:
        dim = value.dim if isinstance(value, Scalar) else None
        rest = dim.divide(tokens) if dim is not None else None
        if rest is None or rest.atoms & RUNTIME:
            return False
    return True


def _counts_rows(ctx: Context, test: Test) -> bool:
    """Does the condition compare with the number of requests?"""
    run = ctx.facts.prefill
    assert run is not None
    values = (test.frame.values.get(id(n)) for n in ast.walk(test.node))
    return any(v is not None and run.walk.as_dim(v) == Dim.atom("B") for v in values)


def _one_request(test: Test) -> bool:
    """Is it `batch == 1` (or `!=`, `>`)?"""
    if not isinstance(test.node, ast.Compare):
        return False
    sides = [test.node.left, *test.node.comparators]
    return any(isinstance(s, ast.Constant) and s.value == 1 for s in sides)


def _counts_tokens(test: Test) -> bool:
    return isinstance(test.node, ast.Compare) and len(test.node.ops) == 1


def _raises(test: Test) -> bool:
    """A guard that only raises cannot change a result."""
    owner = test.owner
    return isinstance(owner, ast.Assert) or (
        isinstance(owner, ast.If) and all(isinstance(s, ast.Raise) for s in owner.body) and not owner.orelse
    )
