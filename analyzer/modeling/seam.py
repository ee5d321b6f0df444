"""Find the seam of each attention class: fresh Q, K, V on one side, the attention output on the other."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvskill.analyzer.modeling.dims import Dim, const
from kvskill.analyzer.modeling.facts import Binding, Seam
from kvskill.analyzer.modeling.hazards import attention_hazard
from kvskill.analyzer.modeling.headmap import wrong_pairs
from kvskill.analyzer.modeling.held import HELD
from kvskill.analyzer.modeling.reps import RepRun, Write, mask_doubt
from kvskill.analyzer.modeling.scores import Attend
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import (
    between,
    chain,
    layout_of,
    method_frame,
    root_of,
    stmt_in,
    tensor_parents,
    through,
)
from kvskill.analyzer.modeling.values import Const, Dict_, External, Frame, Func, Instance, Ref, Scalar, Tensor, Value
from kvskill.analyzer.modeling.walk import Walk
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.source import SourceFile

_PADDED = LAYOUT | {"filled"}  # packed tokens written into a padded buffer

__all__ = ["SeamError", "find_seam"]


class SeamError(Exception):
    """The seam is not certain; carries the finding."""

    def __init__(self, finding: Diagnostic) -> None:
        super().__init__(str(finding))
        self.finding = finding


def _fail(file: SourceFile, node: ast.AST | None, code: str, fact: str, todo: str) -> SeamError:
    span = file.span(node) if node is not None else Span(file.shown)
    return SeamError(Diagnostic(code, Severity.BLOCKING, fact, todo, span))


def find_seam(reps: list[RepRun]) -> Seam:
    """The seam shared by all runs of one class. Raises SeamError with a place when it is not certain."""
    first = reps[0]
    file = first.inst.cls.file
    cls_node = first.inst.cls.node
    for rep in reps:
        _check_parts(rep, file, cls_node)
    kept = {_kv_writes(rep)[0].cache.attrs.get("name") for rep in reps}
    if len(kept) != 1:
        write = _kv_writes(reps[0])[0]
        fact = "Prefill and decode take the keys from different caches."
        raise _fail(write.frame.file, write.node, "KV153", fact, "Write and read keys and values by one cache each.")
    prefill = next(r for r in reps if r.run.phase == "prefill")
    doubt: SeamError | None = None
    for frame in _common_frames(reps, file):
        func = frame.func
        assert isinstance(func, ast.FunctionDef) and frame.owner is not None
        frames = {id(r): _frame_of(r, func) for r in reps}
        try:
            anchor, names = _place(reps, frames, func, frame.file)
            break
        except SeamError as exc:  # K and V may get their names in a caller
            doubt = doubt or exc
    else:
        assert doubt is not None
        raise doubt
    removed = _removed(reps, frames, names, anchor)
    q, k, v = (_binding(prefill, frames[id(prefill)], anchor, n, frame.file) for n in names)
    out, extra, post = _output(reps, frames, func, frame.file)
    removed.extend(p for p in post if p not in removed)
    inst = prefill.inst
    attend = prefill.attends[0]
    seq, batch = _axes(prefill)
    q_value = _value_before(frames[id(prefill)], anchor, names[0])
    k_value = _value_before(frames[id(prefill)], anchor, names[1])
    heads, kv_heads, k_dim, v_dim = _geometry(prefill, attend, q_value, k_value, seq, batch, frame, inst, names)
    _check_pairs(prefill, [_value_before(frames[id(prefill)], anchor, n) for n in names], frame.file)
    _check_scales(reps, frame.file)
    scale, scale_value = _scale(prefill, attend, frames[id(prefill)], q.name, k_dim, frame.file)
    sinks = _sinks(prefill, attend, frames[id(prefill)])
    return Seam(
        func=func,
        file=frame.file,
        owner=frame.owner,
        self_name=func.args.args[0].arg if func.args.args else "self",
        anchor=anchor,
        q=q,
        k=k,
        v=v,
        out=out,
        extra_targets=extra,
        removed=tuple(removed),
        heads_expr=heads,
        kv_heads_expr=kv_heads,
        k_dim_expr=k_dim,
        v_dim_expr=v_dim,
        scale_expr=scale,
        scale_value=scale_value,
        sinks_expr=sinks,
        meta_expr=_meta_expr(prefill, frames[id(prefill)], anchor),
        kinds=tuple(sorted({a.kind for r in reps for a in r.attends})),
        k_cache=_cache_name(prefill, 0, "k_cache"),
        v_cache=_cache_name(prefill, 1, "v_cache"),
    )


def _check_pairs(rep: RepRun, fresh: list[Tensor], file: SourceFile) -> None:
    """Query heads must meet the key heads that the fused operator gives them."""
    walk, attend = rep.walk, rep.attends[0]
    seq, batch = _axes(rep)
    k_write, v_write = _kv_writes(rep)
    q_dims = _head_dims(rep, attend.q, seq, batch)
    k_dims = _head_dims(rep, k_write.value, seq, batch) or _unit_dims(walk, rep.inst)
    v_dims = _head_dims(rep, v_write.value, seq, batch) or k_dims
    if q_dims is None or k_dims is None or v_dims is None:
        return
    n_q, n_kv, k_dim, v_dim = (walk.concrete_dim(d) for d in (q_dims[0], *k_dims, v_dims[1]))
    if n_q is None or n_kv is None or k_dim is None or v_dim is None:
        return
    q, k, v = fresh
    wrong = wrong_pairs(walk, attend, q, k, v, (n_q, n_kv, k_dim, v_dim), seq, batch)
    if wrong is not None:
        where = attend.out.frame.file if attend.out.frame is not None else file
        raise _fail(
            where,
            attend.out.node,
            "KV146",
            f"The heads are paired otherwise than the fused operator pairs them: {wrong}.",
            "Repeat key heads one by one (repeat_interleave), or reorder the projection's heads.",
        )


def _check_scales(reps: list[RepRun], file: SourceFile) -> None:
    """Both phases scale the scores alike: by one number, or by the same expression where it cannot be computed."""
    known: dict[str, tuple[RepRun, float | str]] = {}
    for rep in reps:
        number = _scale_number(rep)
        mark: float | str = _scale_text(rep) if number is None else number
        other, first = known.setdefault(rep.inst.path, (rep, mark))
        alike = (
            math.isclose(first, mark, rel_tol=1e-6)
            if isinstance(first, float) and isinstance(mark, float)
            else first == mark
        )
        if not alike:
            out = rep.attends[0].out
            where = out.frame.file if out.frame is not None else file
            shown = [f"{m:.6g}" if isinstance(m, float) else "a number that is not known" for m in (first, mark)]
            fact = f"The scores are scaled by {shown[0]} in {other.run.phase} and by {shown[1]} in {rep.run.phase}."
            raise _fail(where, out.node, "KV147", fact, "Scale alike in prefill and decode, from one attribute.")


def _scale_text(rep: RepRun) -> str:
    return " ".join(f"{op} {rep.walk.as_text(value)}" for op, value, _ in rep.attends[0].scale)


def _scale_number(rep: RepRun) -> float | None:
    """The softmax scale of one object in one phase, where it can be computed."""
    attend, total = rep.attends[0], 1.0
    if attend.default_scale:
        size = rep.walk.concrete_dim(attend.q.shape[-1]) if attend.q.shape else None
        return size**-0.5 if size else None
    for op, value, _ in attend.scale:
        number = _number(rep.walk, value)
        if not number:
            return None
        total = total * number if op == "mul" else total / number
    return total


def _number(walk: Walk, value: Value) -> float | None:
    if isinstance(value, Const):
        return float(value.value) if isinstance(value.value, (int, float)) else None
    if not isinstance(value, (Scalar, Ref)):
        return None
    missing = False

    def known(match: re.Match[str]) -> str:
        nonlocal missing
        found = walk.concrete(match.group(0))
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            missing = True
        return repr(found)

    text = re.sub(r"\b(?:config|infer)(?:\.[A-Za-z_]\w*)+", known, walk.as_text(value))
    try:
        return None if missing else _computed(ast.parse(text, mode="eval").body)
    except (ArithmeticError, SyntaxError, ValueError, OverflowError):
        return None


_SUMS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _computed(node: ast.expr) -> float | None:
    """The value of an expression of numbers, the four operations, powers and square roots."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _computed(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        left, right = _computed(node.left), _computed(node.right)
        if left is None or right is None:
            return None
        found = _SUMS[type(node.op)](left, right)
        return found if isinstance(found, float) else None
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "math.sqrt" and len(node.args) == 1:
        inner = _computed(node.args[0])
        return None if inner is None else math.sqrt(inner)
    return None


def _cache_name(rep: RepRun, which: int, fresh: str) -> str:
    """The attribute of the attention object that holds a cache, or will hold it."""
    name = str(_kv_writes(rep)[which].cache.attrs["name"])
    if not name.startswith(HELD):
        return name
    return fresh if fresh not in rep.inst.attrs else f"paged_{fresh}"


def _check_parts(rep: RepRun, file: SourceFile, node: ast.AST) -> None:
    name, phase = rep.inst.cls.name, rep.run.phase
    todo = "Convert this class by hand, or bring it into one of the forms in `kvskill explain idioms`."
    if not rep.attends:
        raise _fail(file, node, "KV150", f"No attention computation was found in {name} in {phase}.", todo)
    if len(rep.attends) > 1:
        where = rep.attends[1].out.node
        fact = f"{name} computes attention more than once in {phase}."
        raise _fail(rep.attends[1].out.frame.file if rep.attends[1].out.frame else file, where, "KV151", fact, todo)
    for bad in rep.attends[0].bad:
        where_file = bad.where.frame.file if bad.where is not None and bad.where.frame is not None else file
        fact = f"The fused attention operator cannot express {bad.what}."
        raise _fail(where_file, bad.node, bad.code, fact, "Keep the Legacy cache for this model, or remove it.")
    where = rep.attends[0].out.node or node
    if rep.visible is not None and rep.visible.bias is not None:
        fact = f"{name} adds a bias (not only a mask) to the attention scores in {phase}: {rep.visible.bias:.6g}."
        raise _fail(file, where, "KV145", fact, "Keep the Legacy cache for this model, or remove it.")
    if rep.cut is not None:
        fact = f"{name} reads {rep.cut} of its cache in {phase}."
        raise _fail(file, where, "KV148", fact, "Read all cached tokens, and say a window with a mask in both phases.")
    doubt = mask_doubt(rep)
    if doubt is not None:
        fact = f"{name} attends {doubt} in {phase}."
        raise _fail(file, where, "KV299", fact, "Keep the Legacy cache, or mask later tokens.")
    check_hazards(rep, file)
    caches = {w.cache.attrs.get("name") for w in rep.writes}
    if len(rep.writes) != 2 or len(caches) != 2:
        where2 = rep.writes[-1].node if rep.writes else node
        where_file = rep.writes[-1].frame.file if rep.writes else file
        fact = f"{name} writes its cache {len(rep.writes)} times in {phase}; one write of K and one of V is expected."
        raise _fail(where_file, where2, "KV152", fact, todo)


def check_hazards(rep: RepRun, file: SourceFile) -> None:
    """Raises SeamError for what the conversion would lose."""
    hazard = attention_hazard(rep)
    if hazard is not None:
        where = hazard.frame.file if hazard.frame is not None else file
        raise _fail(where, hazard.node, hazard.code, hazard.fact, hazard.todo)


def _kv_writes(rep: RepRun) -> tuple[Write, Write]:
    """(K write, V write): by the cache that the attention reads as K, else by the fresh K that it reads."""
    attend = rep.attends[0]
    a, b = rep.writes
    for first, second in ((a, b), (b, a)):
        if _reads(attend.k, first) and _reads(attend.v, second):
            return first, second
    raise _fail(
        a.frame.file,
        a.node,
        "KV153",
        "What is written to the cache is not what the attention reads as key and value.",
        "Write exactly the keys and values that are attended, after norm and rotary.",
    )


def _reads(value: Tensor, write: Write) -> bool:
    """Does the attention operand come from this cache or from the very tensor written to it?"""
    want = {id(write.cache)}
    roots = set(map(id, chain(write.value)))
    ends = through(value, lambda t: t.op == "cache" or id(t) in roots)
    cache_name, owner = write.cache.attrs.get("name"), write.cache.attrs.get("owner")
    return bool(ends) and all(
        id(t) in want
        or id(t) in roots
        or (t.op == "cache" and t.attrs.get("name") == cache_name and t.attrs.get("owner") is owner)
        for t in ends
    )


def _common_frames(reps: list[RepRun], file: SourceFile) -> list[Frame]:
    """Methods of the attention object in which all its attention computations happen, innermost first."""
    rep = reps[0]
    start = method_frame(rep.attends[0].out.frame, rep.inst)
    options = [f for f in (start.chain() if start else []) if f.self_ is rep.inst]
    found = [f for f in options if all(_frame_of_or_none(r, f.func) is not None for r in reps)]
    if not found:
        raise _fail(file, rep.inst.cls.node, "KV154", "Prefill and decode attention share no method.", "Join them.")
    return found


def _frame_of_or_none(rep: RepRun, func: ast.AST | None) -> Frame | None:
    frame = rep.attends[0].out.frame
    while frame is not None:
        if frame.func is func and frame.self_ is rep.inst:
            return frame
        frame = frame.parent
    return None


def _frame_of(rep: RepRun, func: ast.FunctionDef) -> Frame:
    frame = _frame_of_or_none(rep, func)
    assert frame is not None
    return frame


def _essential(rep: RepRun, frame: Frame) -> list[ast.stmt]:
    """The statements of the function during which K and V are written and attention is computed."""
    out: list[ast.stmt] = []
    for t_frame, stmt in [(w.frame, w.stmt) for w in rep.writes] + [(a.out.frame, a.out.stmt) for a in rep.attends]:
        found = stmt_in(frame, t_frame, stmt)
        if found is not None and found not in out:
            out.append(found)
    return out


def _top(func: ast.FunctionDef, stmt: ast.stmt) -> ast.stmt:
    """The statement of the function's own block that contains `stmt`."""
    for top in func.body:
        if top is stmt or any(n is stmt for n in ast.walk(top)):
            return top
    return stmt


def _place(
    reps: list[RepRun], frames: dict[int, Frame], func: ast.FunctionDef, file: SourceFile
) -> tuple[ast.stmt, tuple[str, str, str]]:
    """Where the new code goes and which names hold fresh Q, K, V there, in every run."""
    tops: list[ast.stmt] = []
    for rep in reps:
        for stmt in _essential(rep, frames[id(rep)]):
            top = _top(func, stmt)
            if top not in tops:
                tops.append(top)
    tops.sort(key=lambda s: s.lineno)
    tried: list[str] = []
    for anchor in tops:
        names = _names_at(reps, frames, func, anchor, tried)
        if names is not None:
            return anchor, names
    missing = ", ".join(tried) or "Q, K or V"
    raise _fail(
        file,
        tops[0] if tops else func,
        "KV155",
        f"No place was found where fresh query, key and value all have names ({missing} has none).",
        "Give the projected and rotated Q, K and V names of their own before the cache is written.",
    )


def _names_at(
    reps: list[RepRun], frames: dict[int, Frame], func: ast.FunctionDef, anchor: ast.stmt, tried: list[str]
) -> tuple[str, str, str] | None:
    choices: list[list[set[str]]] = [[], [], []]
    order: list[list[str]] = [[], [], []]
    for rep in reps:
        env = frames[id(rep)].env_before.get(id(anchor))
        if env is None:
            return None
        attend = rep.attends[0]
        k_write, v_write = _kv_writes(rep)
        for i, value in enumerate((attend.q, k_write.value, v_write.value)):
            ids = {id(t): n for n, t in enumerate(_fresh_chain(rep, value))}
            found = sorted(((ids[id(val)], name) for name, val in env.items() if id(val) in ids), key=lambda x: x[0])
            choices[i].append({name for _, name in found})
            if rep.run.phase == "prefill" and not order[i]:
                order[i] = [name for _, name in found]
    out: list[str] = []
    for i, label in enumerate(("query", "key", "value")):
        common = set.intersection(*choices[i]) if choices[i] else set()
        ranked = [n for n in order[i] if n in common]
        if not ranked:
            if label not in tried:
                tried.append(label)
            return None
        out.append(ranked[0])
    return out[0], out[1], out[2]


def _fresh_chain(rep: RepRun, value: Tensor) -> list[Tensor]:
    """What an operand is a rearrangement of, nearest first; paged code may take it request by request."""
    out = chain(value, _PADDED)
    while rep.run.form == "paged" and out[-1].op == "getitem" and _some_tokens(out[-1]):
        out += chain(out[-1].parents[0], _PADDED)
    return out


def _some_tokens(t: Tensor) -> bool:
    """`x[start:end]`: some rows of the first axis, all of the others."""
    parts = t.attrs.get("parts") or []
    return len(parts) == 1 and isinstance(parts[0], slice) and bool(t.parents) and isinstance(t.parents[0], Tensor)


def _value_before(frame: Frame, anchor: ast.stmt, name: str) -> Tensor:
    value = frame.env_before[id(anchor)][name]
    assert isinstance(value, Tensor)
    return value


def _removed(
    reps: list[RepRun], frames: dict[int, Frame], names: tuple[str, str, str], anchor: ast.stmt
) -> list[tuple[Func, ast.stmt]]:
    """The statements that only lead from the fresh values and the cache to the attention output."""
    out: list[tuple[Func, ast.stmt]] = []
    seen: set[int] = set()

    def add(at: Frame, stmt: ast.stmt | None) -> None:
        if stmt is None or id(stmt) in seen or not isinstance(at.func, ast.FunctionDef):
            return
        seen.add(id(stmt))
        out.append((Func(at.func, at.file, at.owner), stmt))

    for rep in reps:
        here = frames[id(rep)]
        attend = rep.attends[0]
        starts: set[Tensor] = {t for t in rep.walk.tensors if t.op == "cache" and t.attrs.get("owner") is rep.inst}
        for name in names:
            starts.update(chain(_value_before(here, anchor, name)))
        data = between(rep.walk, starts, [attend.out])
        side = _side_inputs(attend)
        for t in data:
            if t in side:
                continue
            inner = stmt_in(here, t.frame, t.stmt)
            if inner is not None:
                add(here, inner)
            elif t.frame is not None and method_frame(t.frame, rep.inst) is not None:
                add(t.frame, t.stmt)
        for write in rep.writes:
            inner = stmt_in(here, write.frame, write.stmt)
            if inner is not None:
                add(here, inner)
            else:
                add(write.frame, write.stmt)
    return out


def _side_inputs(attend: Attend) -> set[Tensor]:
    out: set[Tensor] = set()
    for mask in attend.masks:
        out.add(mask)
    return out


def _axes(rep: RepRun) -> tuple[Dim, Dim]:
    """(sequence, batch) of the hidden states: S and B, or B*S and 1 where a shim puts all tokens in one row; T and 1
    for packed tokens."""
    if rep.run.form == "paged":
        return Dim.atom("T"), const(1)
    for t in rep.walk.tensors:
        if t.op == "embedding" and t.shape is not None and len(t.shape) == 3 and t.shape[0].value == 1:
            return t.shape[1], t.shape[0]
    return Dim.atom("S") if rep.run.phase == "prefill" else const(1), Dim.atom("B")


def _binding(rep: RepRun, frame: Frame, anchor: ast.stmt, name: str, file: SourceFile) -> Binding:
    value = _value_before(frame, anchor, name)
    seq, batch = _axes(rep)
    layout = layout_of(rep.walk, value, seq, batch)
    if layout is None:
        shape = "unknown" if value.shape is None else "[" + ", ".join(map(str, value.shape)) + "]"
        raise _fail(
            file,
            anchor,
            "KV156",
            f"The axes of `{name}` could not be told apart (shape {shape}).",
            "View it as [batch, seq, heads, dim] with named sizes before the cache write.",
        )
    return Binding(name, layout.kind)


def _output(
    reps: list[RepRun], frames: dict[int, Frame], func: ast.FunctionDef, file: SourceFile
) -> tuple[Binding, tuple[str, ...], list[tuple[Func, ast.stmt]]]:
    """The name under which the attention output goes on, its layout, and what lies in between."""
    names: list[str] = []
    extra: set[str] = set()
    layout: str | None = None
    post: list[tuple[Func, ast.stmt]] = []
    seen: set[int] = set()
    for rep in reps:
        frame = frames[id(rep)]
        walk = rep.walk
        family = {rep.attends[0].out}
        joined = {"cat", "stack", "select", "getitem"} if rep.run.form == "paged" else set()  # request by request
        padded = [t.attrs.get("index") for t in chain(rep.attends[0].q, _PADDED) if t.op == "filled"]
        for t in walk.tensors:
            passes = t.op in LAYOUT | {"join"} | joined or (t.op == "index_select" and t.parents[-1] in padded)
            if passes and any(p in family for p in tensor_parents(t)):
                family.add(t)
        ids = {id(t): t for t in family}
        consumer, name, value = _consumer(frame, func, ids)
        if consumer is None or name is None or value is None:
            raise _fail(file, func, "KV157", "The attention output does not go on under one name.", "Name it.")
        names.append(name)
        if rep.run.phase == reps[0].run.phase:
            seq, batch = _axes(rep)
            found = layout_of(walk, value, seq, batch)
            if found is None and rep.run.form == "paged" and value.shape and value.shape[0].wild:
                # joined request by request: the count of rows is not known, and there is one for each token
                found = layout_of(walk, replace(value, shape=(seq, *value.shape[1:])), seq, batch)
            if found is None:
                raise _fail(
                    file, consumer, "KV156", f"The axes of `{name}` could not be told apart.", "Reshape it once."
                )
            if layout is not None and layout != found.kind:
                raise _fail(file, consumer, "KV157", f"`{name}` has two layouts.", "Give it one.")
            layout = found.kind
        for t in family:
            stmt = stmt_in(frame, t.frame, t.stmt)
            if stmt is None or stmt is consumer or id(stmt) in seen:
                continue
            if stmt.lineno < consumer.lineno and t is not rep.attends[0].out:
                seen.add(id(stmt))
                post.append((Func(func, frame.file, frame.owner), stmt))
        stmt = stmt_in(frame, rep.attends[0].out.frame, rep.attends[0].out.stmt)
        if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Tuple):
            for elt in stmt.targets[0].elts:
                if isinstance(elt, ast.Name):
                    extra.add(elt.id)
    if len(set(names)) != 1 or layout is None:
        raise _fail(file, func, "KV157", f"The attention output goes on as {sorted(set(names))}.", "Use one name.")
    extra.discard(names[0])
    return Binding(names[0], layout), tuple(sorted(extra)), post


def _consumer(
    frame: Frame, func: ast.FunctionDef, family: dict[int, Tensor]
) -> tuple[ast.stmt | None, str | None, Tensor | None]:
    """The first statement that uses the output for more than rearranging it, with the name that it reads."""
    ids = set(family)
    for stmt in _statements(func.body):
        if isinstance(stmt, (ast.If, ast.For, ast.With, ast.Try, ast.While, ast.Match)):
            continue
        if id(stmt) not in frame.env_before:
            continue
        reads = [
            n
            for n in ast.walk(stmt)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(frame.values.get(id(n))) in ids
        ]
        if not reads:
            continue
        value = stmt.value if isinstance(stmt, (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)) else None
        if isinstance(stmt, ast.Assign) and value is not None and id(frame.values.get(id(value))) in ids:
            continue  # mere rearrangement
        env = frame.env_before[id(stmt)]
        name = reads[0].id
        held = env.get(name)
        if isinstance(held, Tensor) and id(held) in ids:
            return stmt, name, held
    return None, None, None


def _statements(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    for stmt in body:
        yield stmt
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(stmt, part, []))
        for case in getattr(stmt, "cases", []):
            yield from _statements(case.body)


def _geometry(
    rep: RepRun,
    attend: Attend,
    q: Tensor,
    k: Tensor,
    seq: Dim,
    batch: Dim,
    frame: Frame,
    inst: Instance,
    names: tuple[str, str, str],
) -> tuple[str, str, str, str]:
    """Expressions for query heads, KV heads, K size and V size in the seam's scope."""
    walk = rep.walk
    k_write, v_write = _kv_writes(rep)
    q_dims = _head_dims(rep, attend.q, seq, batch)
    k_dims = _head_dims(rep, k_write.value, seq, batch) or _head_dims(rep, attend.k, seq, batch)
    v_dims = _head_dims(rep, v_write.value, seq, batch) or _head_dims(rep, attend.v, seq, batch)
    self_name = frame.func.args.args[0].arg if isinstance(frame.func, ast.FunctionDef) else "self"

    def expr(dim: Dim | None, given: Value | None, what: str) -> str:
        for target in (walk.as_dim(given) if given is not None else None, dim):
            if target is not None:
                found = attr_for(walk, inst, target) or _config_path(inst, target) or _unit_attr(walk, inst, target)
                if found is not None:
                    return f"{self_name}.{found}"
                if target.value is not None:
                    return str(target.value)
        raise _fail(
            frame.file,
            frame.func,
            "KV158",
            f"The {what} of {inst.cls.name} is not held by an attribute (it is {dim or 'unknown'}).",
            "Keep it in an attribute of the attention class.",
        )

    unit = _unit_dims(walk, inst)
    kv_dim = k_dims[0] if k_dims else (unit[0] if unit else None)
    size = k_dims[1] if k_dims else (unit[1] if unit else None)
    v_size = v_dims[1] if v_dims else size
    try:
        heads = expr(q_dims[0] if q_dims else None, attend.heads, "number of query heads")
    except SeamError:
        axis = {"BSND": 2, "BNSD": 1, "TND": 1}.get(layout.kind) if (layout := layout_of(walk, q, seq, batch)) else None
        if axis is None:
            raise
        heads = f"{names[0]}.shape[{axis}]"
    kv = expr(kv_dim, attend.kv_heads, "number of KV heads")
    return heads, kv, expr(size, None, "head size"), expr(v_size, None, "value head size")


def _unit_dims(walk: Walk, inst: Instance) -> tuple[Dim, Dim] | None:
    unit = inst.attrs.get("cache_unit")
    dims = walk.unit_dims(unit) if unit is not None else None
    return (dims[0], dims[1]) if dims is not None and len(dims) == 2 else None


def _head_dims(rep: RepRun, value: Tensor, seq: Dim, batch: Dim) -> tuple[Dim, Dim] | None:
    """(heads, size) from the nearest rearrangement of `value`, or what it was computed from, that shows both."""
    if rep.run.phase != "prefill":
        return None
    todo: list[Tensor] = [value]
    for _ in range(40):
        if not todo:
            return None
        t = todo.pop(0)
        layout = layout_of(rep.walk, t, seq, batch)
        if layout is not None and layout.heads is not None and layout.dim is not None:
            if not (layout.heads.wild or layout.dim.wild):
                return layout.heads, layout.dim
        if t.op in ("embedding",):
            return None
        todo.extend(p for p in tensor_parents(t)[:2])
    return None


def attr_for(walk: Walk, inst: Instance, dim: Dim) -> str | None:
    """The attribute of `inst` that holds a size: the same expression first, else one equal in value and in the
    parallel sizes that it depends on."""
    same: list[str] = []
    close: list[str] = []
    want = walk.concrete_dim(dim)
    parallel = "parallel_config" in str(dim)
    for name, value in inst.attrs.items():
        own = walk.as_dim(value)
        if own is None or isinstance(value, Const):
            continue
        if own == dim:
            same.append(name)
        elif want is not None and walk.concrete_dim(own) == want and ("parallel_config" in str(own)) == parallel:
            close.append(name)
    if same:
        return same[0]
    return close[0] if len(close) == 1 and (dim.wild or "//" in str(dim)) else None


def _unit_attr(walk: Walk, inst: Instance, dim: Dim) -> str | None:
    """A factor of `cache_unit` with this value: what the engine allocates is what the entries must say."""
    stmt = inst.attr_nodes.get("cache_unit")
    want = walk.concrete_dim(dim)
    if stmt is None or want is None:
        return None
    for node in ast.walk(stmt):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in inst.attrs:
            own = walk.as_dim(inst.attrs[node.attr])
            if own is not None and walk.concrete_dim(own) == want:
                return node.attr
    return None


def _config_path(inst: Instance, dim: Dim) -> str | None:
    """A size that is one configuration value, through the configuration that the object keeps."""
    if len(dim.atoms) != 1 or dim != Dim.atom(next(iter(dim.atoms))):
        return None
    path = next(iter(dim.atoms))
    for name, value in inst.attrs.items():
        if isinstance(value, Ref) and path.startswith(value.path + ".") and "[" not in path:
            return name + path[len(value.path) :]
    return None


def _scale(
    rep: RepRun, attend: Attend, frame: Frame, q_name: str, k_dim: str, file: SourceFile
) -> tuple[str, float | None]:
    """The softmax scale as an expression of the seam's scope, and its value when it is known."""
    self_name = frame.func.args.args[0].arg if isinstance(frame.func, ast.FunctionDef) else "self"
    if attend.default_scale:
        return f"{k_dim} ** -0.5", None
    if not attend.scale:
        return "1.0", 1.0
    parts: list[str] = []
    for op, value, node in attend.scale:
        text = _value_expr(rep, frame, value, node, attend, self_name)
        if text is None:
            raise _fail(
                file,
                attend.out.node,
                "KV159",
                "The softmax scale is not an expression of the attention object.",
                "Keep the scale in an attribute of the attention class.",
            )
        parts.append(text if op == "mul" else f"1.0 / ({text})")
    if len(parts) == 1:
        return parts[0], None
    return " * ".join(f"({p})" for p in parts), None


def _value_expr(
    rep: RepRun, frame: Frame, value: Value, node: ast.AST | None, attend: Attend, self_name: str
) -> str | None:
    if isinstance(value, Const) and isinstance(value.value, (int, float)):
        return repr(value.value)
    if _runs_on(attend.out.frame, rep.inst, frame, self_name) and isinstance(node, ast.expr):
        if _only_self(node, self_name, attend.out.frame):
            return frame.file.segment(node)
    text = rep.walk.as_text(value)
    for name, own in rep.inst.attrs.items():
        if isinstance(own, (Scalar, Ref)) and rep.walk.as_text(own) == text:
            return f"{self_name}.{name}"
    for name, own in rep.inst.attrs.items():
        if own is value:
            return f"{self_name}.{name}"
    return _spelled(rep, text, self_name)


def _runs_on(there: Frame | None, inst: Instance, frame: Frame, self_name: str) -> bool:
    """Is what reads only `self` there the same here: this function, or another method of the object in its file?"""
    if there is frame:
        return True
    if there is None or there.self_ is not inst or there.file is not frame.file:
        return False
    return isinstance(there.func, ast.FunctionDef) and there.func.args.args[0].arg == self_name


def _spelled(rep: RepRun, text: str, self_name: str) -> str | None:
    """The canonical text of a number with attributes of the object in the place of configuration values."""
    missing = False
    texts = {rep.walk.as_text(v): n for n, v in rep.inst.attrs.items() if isinstance(v, (Scalar, Ref))}
    for part in sorted(texts, key=len, reverse=True):
        text = text.replace(part, f"{self_name}.{texts[part]}") if "config" in part else text

    def attr(match: re.Match[str]) -> str:
        nonlocal missing
        dim = Dim.atom(match.group(0))
        found = attr_for(rep.walk, rep.inst, dim) or _config_path(rep.inst, dim)
        missing = missing or found is None
        return f"{self_name}.{found}"

    out = re.sub(r"\bconfig(\.[A-Za-z_]\w*)+", attr, text)
    if missing or not re.fullmatch(r"[\w.+\-*/() ,]+", out) or "(" not in text:
        return None
    try:
        tree = ast.parse(out, mode="eval")
    except SyntaxError:
        return None
    tree = _Powers().visit(tree)
    reads = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return ast.unparse(ast.fix_missing_locations(tree)) if reads <= {self_name} else None


class _Powers(ast.NodeTransformer):
    """`math.sqrt(x)` as `x ** 0.5`: the file may know the module by another name, or not at all."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "math.sqrt" and len(node.args) == 1:
            return ast.BinOp(node.args[0], ast.Pow(), ast.Constant(0.5))
        return node


def _only_self(node: ast.expr, self_name: str, frame: Frame | None) -> bool:
    """Does the expression read nothing but `self` and what the file imports (math, torch)?"""
    values = frame.values if frame is not None else {}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return all(n.id == self_name or isinstance(values.get(id(n)), External) for n in names)


def _sinks(rep: RepRun, attend: Attend, frame: Frame) -> str | None:
    if attend.sinks is None:
        return None
    self_name = frame.func.args.args[0].arg if isinstance(frame.func, ast.FunctionDef) else "self"
    root = root_of(attend.sinks)
    for name, own in rep.inst.attrs.items():
        if own is attend.sinks or (root is not None and own is root):
            return f"{self_name}.{name}"
    raise _fail(
        frame.file,
        attend.out.node,
        "KV160",
        "Attention sinks were found, but not as a parameter of the attention class.",
        "Keep them in a parameter [query heads] of the attention class.",
    )


def _meta_expr(rep: RepRun, frame: Frame, anchor: ast.stmt) -> str | None:
    env = frame.env_before.get(id(anchor), frame.env)
    for name, value in env.items():
        if value is rep.run.meta:
            return name
        if isinstance(value, Dict_):
            for key, inner in value.items.items():
                if inner is rep.run.meta and isinstance(key, str):
                    return f'{name}["{key}"]'
    return None
