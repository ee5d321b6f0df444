"""Multi-head latent attention: found by its projections, their dims and the flow of data, not by names.

The fingerprint: one projection (`down`) gives a latent and a rope part; a norm acts on the latent only; a second
projection (`up`) turns the normalised latent into heads * (nope + v); the rope part is shared by all heads. What
the Legacy code caches does not matter: decompressed keys and values, or the latent itself.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.facts import Binding, Seam
from kvskill.analyzer.modeling.mla_parts import Fingerprint, Parts, fingerprint, parts_of, sum_of_products
from kvskill.analyzer.modeling.mla_rope import FusedWrite, fused_write
from kvskill.analyzer.modeling.operators import argument
from kvskill.analyzer.modeling.reps import RepRun, Write, mask_doubt
from kvskill.analyzer.modeling.run import submodules
from kvskill.analyzer.modeling.seam import (
    SeamError,
    _axes,
    _binding,
    _common_frames,
    _config_path,
    _essential,
    _fail,
    _frame_of,
    _meta_expr,
    _output,
    _removed,
    _scale,
    _top,
    _value_before,
    attr_for,
    check_hazards,
)
from kvskill.analyzer.modeling.trace import ancestors, chain, layout_of, method_frame, root_of
from kvskill.analyzer.modeling.values import Const, Frame, Instance, Tensor
from kvskill.source import SourceFile

__all__ = ["MlaFacts", "find_mla"]

_ROPE_ARGUMENTS = tuple(f"the argument `{n}` of the fused operator" for n in ("query_rope", "key_rope"))
_Found = tuple[RepRun, Parts]
_BY_HAND = "Convert this class by hand (`kvskill template show framework/mla_attend`)."


@dataclass(frozen=True, eq=False)
class MlaFacts:
    """One latent attention class. Names hold in the seam's function, expressions in it (`self.` is the seam's own).

    `latent` is the value that enters `up`, or its input to the norm when `normed` is False. Sizes are expressions;
    `values` has their numbers for this configuration.
    """

    q_nope: Binding  # the absorbed query [.., N, rank] where `absorbed`
    q_rope: Binding
    latent: Binding
    normed: bool
    k_rope: Binding
    down: str
    norm: str
    up: str | None
    rank: str
    nope: str
    rope: str
    v: str
    values: dict[str, int]
    fused: FusedWrite | None
    why_not_fused: str
    caches: tuple[str, ...]  # the Legacy placeholders' names
    tables: tuple[str, ...]  # attributes that hold block tables of the class's own
    only_fused: bool  # the Legacy code has no norm and rotary of its own
    init_cache: tuple[ast.FunctionDef, SourceFile] | None
    halves: tuple[str, str] | None = None  # attributes with the up projection's halves, [N, nope, rank], [N, rank, v]
    absorbed: bool = False  # decode: the Legacy code's own products around the attention stay
    phase: str = ""  # the only phase that runs this function; "" for both
    twin: tuple[Seam, MlaFacts] | None = None  # decode, where another function does it


def find_mla(mine: list[Instance], reps: list[RepRun]) -> tuple[Seam, MlaFacts] | None:
    """The seam and the facts of a latent attention class; None when the class is no such thing.

    Raises SeamError with a place when the fingerprint is there but something is not certain: such a class must not
    be converted as ordinary attention.
    """
    first = reps[0]
    mark = fingerprint(first)
    if mark is None:
        managed = _self_managed(reps)
        if managed is not None:
            raise managed
        return None
    cls = first.inst.cls
    file, node = cls.file, cls.node
    _check(reps, file, node)
    found: list[_Found] = []
    for rep in reps:
        here = fingerprint(rep)
        parts = parts_of(rep, here) if here is not None else "the latent path differs between the phases"
        if here is None or isinstance(parts, str):
            fact = f"{cls.name} is latent attention, but {parts} ({rep.run.phase})."
            raise _fail(file, node, "KV270", fact, _BY_HAND)
        if not _same_projections(here, mark):
            raise _fail(file, node, "KV270", f"{cls.name} uses other projections in decode.", _BY_HAND)
        found.append((_with_writes(rep, here), parts))
    try:
        return _seam(mine, found, mark)
    except SeamError as exc:
        prefill, decode = ([(r, p) for r, p in found if r.run.phase == name] for name in ("prefill", "decode"))
        if not prefill or not decode or _method(prefill[0][0]) is _method(decode[0][0]):
            raise
        try:
            return _two_seams(mine, prefill, decode)
        except SeamError as inner:
            raise inner from exc


def _two_seams(mine: list[Instance], prefill: list[_Found], decode: list[_Found]) -> tuple[Seam, MlaFacts]:
    """One seam per phase, each in the method that runs it."""
    marks = [fingerprint(part[0][0]) for part in (prefill, decode)]
    assert marks[0] is not None and marks[1] is not None
    seam, facts = _seam(mine, prefill, marks[0])
    late, other = _decode_seam(mine, decode, marks[1])
    if (facts.fused is None) is not (other.fused is None):  # one cache has one format
        if facts.only_fused or other.only_fused:
            why = facts.why_not_fused or other.why_not_fused
            fact = f"One phase writes with the fused operator and the other cannot: {why}."
            raise _fail(late.file, late.anchor, "KV298", fact, _BY_HAND)
        why = facts.why_not_fused or other.why_not_fused
        facts, other = (replace(f, fused=None, why_not_fused=why) for f in (facts, other))
    return seam, replace(
        facts,
        phase="prefill",
        twin=(late, replace(other, phase="decode")),
        tables=tuple(sorted({*facts.tables, *other.tables})),
    )


def _decode_seam(mine: list[Instance], found: list[_Found], mark: Fingerprint) -> tuple[Seam, MlaFacts]:
    """The decode seam. Where the query's absorbed form has a name, the Legacy code's products on both sides stay."""
    if mark.halves.keys is not None:
        outer = [(rep, replace(parts, q_nope=rep.attends[0].q, out=rep.attends[0].out)) for rep, parts in found]
        try:
            seam, facts = _seam(mine, outer, mark)
            return seam, replace(facts, absorbed=True)
        except SeamError as exc:
            if exc.finding.code != "KV274":
                raise
    return _seam(mine, found, mark)


def _method(rep: RepRun) -> ast.AST | None:
    """The object's method that runs its attention."""
    frame = method_frame(rep.attends[0].out.frame, rep.inst)
    return frame.func if frame is not None else None


def _same_projections(a: Fingerprint, b: Fingerprint) -> bool:
    """The same projections; the up projection as a layer in one phase and in halves in the other is one."""
    if (a.down, a.norm) != (b.down, b.norm):
        return False
    ups = {m.up for m in (a, b)} - {None}
    halves = {(m.halves.keys, m.halves.values) for m in (a, b)} - {(None, None)}
    return len(ups) <= 1 and len(halves) <= 1


def _with_writes(rep: RepRun, mark: Fingerprint) -> RepRun:
    """The fused operator of the Legacy code as two writes."""
    call = mark.call
    if call is None:
        return rep
    out: list[Write] = []
    for name, value in (("k_cache", mark.rope_in), ("ckv_cache", mark.normed)):
        cache = root_of(argument(call.name, call.args, call.kwargs, name))  # type: ignore[arg-type]
        if cache is not None:
            out.append(Write(cache, value, call.frame, call.stmt, call.node))
    return replace(rep, writes=out)


def _self_managed(reps: list[RepRun]) -> SeamError | None:
    """A class that already calls the operators of the latent path, over blocks and slots of its own.

    Such code needs other arguments, not other code; it is named place by place and left alone.
    """
    places: dict[str, str] = {}
    found: tuple[SourceFile, ast.AST] | None = None
    for rep in reps:
        for call in rep.walk.calls:
            op = call.name.removeprefix("npu:")
            if call.name == op or method_frame(call.frame, rep.inst) is None:
                continue
            line = call.node.lineno
            if "query_rope" in call.kwargs:
                found = found or (call.frame.file, call.node)
                if call.kwargs.get("block_table", Const(None)) != Const(None):
                    places[f"block_table and key lengths of the call in line {line}"] = rep.run.phase
                else:
                    places[f"lengths of the call in line {line}"] = rep.run.phase
            elif op.startswith(("npu_kv_rmsnorm_rope_cache", "npu_mla_prolog")):
                places[f"slots of the write in line {line}"] = rep.run.phase
    if found is None or not places:
        return None
    what = "; ".join(sorted(places))
    cls = reps[0].inst.cls.name
    return _fail(
        found[0],
        found[1],
        "KV298",
        f"{cls} runs the latent operators over blocks of its own: {what}.",
        "Take slot_mapping and block_table of the metadata by attn_type there, lengths as S27-lengths says, "
        "declare nope_cache and rope_cache as entries, and drop the own block table, slots and init_cache.",
    )


def _check(reps: list[RepRun], file: SourceFile, node: ast.AST) -> None:
    for rep in reps:
        name, phase = rep.inst.cls.name, rep.run.phase
        if len(rep.attends) != 1:
            fact = f"{name} computes latent attention {len(rep.attends)} times in {phase}; once is expected."
            raise _fail(file, node, "KV271", fact, _BY_HAND)
        attend = rep.attends[0]
        products = sum_of_products(attend)
        halves = ancestors(products) if products is not None else set()
        for bad in attend.bad:
            if bad.where in halves and bad.code in ("KV142", "KV145"):
                continue  # no mask: the second half of a score that is the sum of two products
            if bad.code == "KV143" and bad.what in _ROPE_ARGUMENTS:
                continue
            where = bad.where.frame.file if bad.where is not None and bad.where.frame is not None else file
            fact = f"The fused attention operator cannot express {bad.what}."
            raise _fail(where, bad.node, bad.code, fact, "Keep the Legacy cache for this model, or remove it.")
        check_hazards(rep, file)
        doubt = mask_doubt(rep)
        if doubt is not None:
            fact = f"{name} attends {doubt} in {phase}."
            raise _fail(file, attend.out.node or node, "KV299", fact, "Keep the Legacy cache, or mask later tokens.")
        if attend.sinks is not None or attend.windows:
            what = "attention sinks" if attend.sinks is not None else "a sliding window"
            raise _fail(file, node, "KV272", f"{name} is latent attention with {what}.", "Keep the Legacy cache.")


def _seam(mine: list[Instance], found: list[_Found], mark: Fingerprint) -> tuple[Seam, MlaFacts]:
    halves = _own_halves([rep for rep, _ in found])
    reps = [replace(rep, attends=[replace(rep.attends[0], out=parts.out)]) for rep, parts in found]
    found = [(rep, parts) for rep, (_, parts) in zip(reps, found, strict=True)]
    prefill, parts = next((r, p) for r, p in found if r.run.phase == found[0][0].run.phase)
    inst, cls = prefill.inst, prefill.inst.cls
    doubt: SeamError | None = None
    for frame in _common_frames(reps, cls.file):
        func = frame.func
        assert isinstance(func, ast.FunctionDef) and frame.owner is not None
        frames = {id(r): _frame_of(r, func) for r in reps}
        try:
            anchor, names, normed = _place(found, frames, func, frame.file, mark.call is not None)
            break
        except SeamError as exc:
            doubt = doubt or exc
    else:
        assert doubt is not None
        raise doubt
    here = frames[id(prefill)]
    removed = _removed(reps, frames, names, anchor)  # type: ignore[arg-type]
    bindings = [_binding(prefill, here, anchor, n, frame.file) for n in names]
    if mark.call is None:  # else the fused operator takes both from the projection's output
        bindings[2:] = [
            _shared(prefill, here, anchor, b, size, frame.file)
            for b, size in zip(bindings[2:], (parts.rank, parts.rope), strict=True)
        ]
    out, extra, post = _output(reps, frames, func, frame.file)
    removed.extend(p for p in post if p not in removed)
    me = func.args.args[0].arg if func.args.args else "self"
    size = {
        k: _size(prefill, me, d, k, frame.file, func)
        for k, d in (
            ("heads", parts.heads),
            ("rank", parts.rank),
            ("nope", parts.nope),
            ("rope", parts.rope),
            ("v", parts.v),
        )
    }
    values = {k: prefill.walk.concrete_dim(getattr(parts, k)) for k in size}
    if any(v is None for v in values.values()):
        raise _fail(frame.file, func, "KV273", f"The sizes of {cls.name} are not all known.", _BY_HAND)
    scale, scale_value = _scale(
        prefill, prefill.attends[0], here, names[0], f"({size['nope']} + {size['rope']})", frame.file
    )
    fused, why = _fused(found, frames, func, anchor)
    if mark.call is not None and fused is None:
        raise _fail(frame.file, mark.call.node, "KV298", f"The fused write cannot be taken over: {why}.", _BY_HAND)
    seam = Seam(
        func=func,
        file=frame.file,
        owner=frame.owner,
        self_name=me,
        anchor=anchor,
        q=bindings[0],
        k=bindings[2],
        v=bindings[3],
        out=out,
        extra_targets=extra,
        removed=tuple(removed),
        heads_expr=size["heads"],
        kv_heads_expr="1",
        k_dim_expr=size["rank"],
        v_dim_expr=size["rope"],
        scale_expr=scale,
        scale_value=scale_value,
        sinks_expr=None,
        meta_expr=_meta_expr(prefill, here, anchor),
        kinds=("mla",),
        k_cache="nope_cache",
        v_cache="rope_cache",
    )
    facts = MlaFacts(
        q_nope=bindings[0],
        q_rope=bindings[1],
        latent=bindings[2],
        normed=normed,
        k_rope=bindings[3],
        down=mark.down,
        norm=mark.norm,
        up=mark.up,
        rank=size["rank"],
        nope=size["nope"],
        rope=size["rope"],
        v=size["v"],
        values={k: v for k, v in values.items() if v is not None},
        fused=fused,
        why_not_fused=why,
        caches=tuple(n for n, v in inst.attrs.items() if isinstance(v, Tensor) and v.op == "cache"),
        tables=_own_tables(reps),
        only_fused=mark.call is not None,
        init_cache=_own_init_cache(prefill, mine) if prefill.run.phase == "prefill" else None,
        halves=halves,
    )
    return seam, facts


def _shared(rep: RepRun, frame: Frame, anchor: ast.stmt, binding: Binding, size: Dim, file: SourceFile) -> Binding:
    """A part that all heads share: one head of `size`, or copies of it along a head axis."""
    walk, value = rep.walk, _value_before(frame, anchor, binding.name)
    found = layout_of(walk, value, *_axes(rep))
    last = value.shape[-1] if value.shape else None
    if found is None or last is None or not walk.equal_dims(last, size):
        fact = f"`{binding.name}` holds several heads' copies of the shared part side by side."
        raise _fail(file, anchor, "KV274", fact, "Keep the part itself under a name until the cache is written.")
    return replace(binding, copies=found.heads is not None and found.heads.value != 1)


def _own_halves(reps: list[RepRun]) -> tuple[str, str] | None:
    """The attributes with the up projection's halves, where every run multiplies by them."""
    halves = {(m.halves.keys, m.halves.values) for rep in reps if (m := fingerprint(rep)) is not None}
    keys, values = next(iter(halves)) if len(halves) == 1 else (None, None)
    return (keys, values) if keys is not None and values is not None else None


def _fused(
    found: list[_Found], frames: dict[int, Frame], func: ast.FunctionDef, anchor: ast.stmt
) -> tuple[FusedWrite | None, str]:
    """The fused write's inputs, the same in every run and phase; None and the reason otherwise."""
    result: FusedWrite | None = None
    for rep, parts in found:
        mark = fingerprint(rep)
        assert mark is not None
        fused, why = fused_write(rep, frames[id(rep)], func, anchor, mark, parts)
        if fused is None:
            return None, why
        if result is not None and fused != result:
            return None, "its inputs differ between prefill and decode"
        result = result or fused
    return result, ""


def _place(
    found: list[_Found], frames: dict[int, Frame], func: ast.FunctionDef, file: SourceFile, fused: bool
) -> tuple[ast.stmt, tuple[str, str, str, str], bool]:
    """The first statement of writing or attending before which all four parts have names in every run."""
    tops: list[ast.stmt] = []
    for rep, _ in found:
        for stmt in _essential(rep, frames[id(rep)]):
            top = _top(func, stmt)
            if top not in tops:
                tops.append(top)
    tops.sort(key=lambda s: s.lineno)
    missing: list[str] = []
    labels = ("q_nope", "q_rope", "latent", "k_rope")
    for anchor in tops[:1] if fused else tops:
        names: list[str] = []
        normed = True
        for label in labels[:2] * 2 if fused else labels:
            name = _name(found, frames, anchor, label)
            if name is None and label == "latent":
                name, normed = _name(found, frames, anchor, "raw"), False
            if name is None:
                missing.append(label)
                break
            names.append(name)
        if len(names) == 4:
            return anchor, (names[0], names[1], names[2], names[3]), normed
    raise _fail(
        file,
        tops[0] if tops else func,
        "KV274",
        f"No place was found where the parts of the latent attention all have names ({missing[0]} has none).",
        "Name the query's two parts, the latent and the shared rope part before the cache is written.",
    )


def _name(found: list[_Found], frames: dict[int, Frame], anchor: ast.stmt, label: str) -> str | None:
    common: set[str] | None = None
    order: list[str] = []
    for rep, parts in found:
        env = frames[id(rep)].env_before.get(id(anchor))
        if env is None:
            return None
        ids = {id(t): i for i, t in enumerate(chain(getattr(parts, label)))}
        mine = sorted((ids[id(v)], n) for n, v in env.items() if id(v) in ids)
        common = {n for _, n in mine} if common is None else common & {n for _, n in mine}
        if rep.run.phase == found[0][0].run.phase and not order:
            order = [n for _, n in mine]
    return next((n for n in order if n in (common or ())), None)


def _size(rep: RepRun, me: str, dim: Dim, what: str, file: SourceFile, func: ast.FunctionDef) -> str:
    """A size as an expression of the function: an attribute of the object, a configuration value it keeps, a number."""
    found = attr_for(rep.walk, rep.inst, dim) or _config_path(rep.inst, dim)
    if found is not None:
        return f"{me}.{found}"
    if dim.value is not None:
        return str(dim.value)
    raise _fail(
        file,
        func,
        "KV273",
        f"The size `{what}` of {rep.inst.cls.name} is not held by an attribute (it is {dim}).",
        "Keep it in an attribute of the attention class.",
    )


def _own_tables(reps: list[RepRun]) -> tuple[str, ...]:
    """Attributes of the object that reach the operator as block table."""
    out: set[str] = set()
    for rep in reps:
        call = rep.attends[0].call
        table = call.kwargs.get("block_table") if call is not None else None
        below = ancestors([table]) if isinstance(table, Tensor) else set()
        out |= {n for n, v in rep.inst.attrs.items() if isinstance(v, Tensor) and v in below}
    return tuple(sorted(out))


def _own_init_cache(rep: RepRun, mine: list[Instance]) -> tuple[ast.FunctionDef, SourceFile] | None:
    """The model's `init_cache`, which the paged engine will not call; it must allocate nothing but these caches."""
    found = rep.run.root.cls.method("init_cache")
    if found is None:
        return None
    func, owner = found
    for module in submodules(rep.run.root):
        if module in mine:
            continue
        if any(isinstance(v, Tensor) and v.op == "cache" for v in module.attrs.values()):
            raise _fail(
                owner.file,
                func,
                "KV275",
                f"`init_cache` also allocates something in {module.cls.name}; the paged engine will not call it.",
                "Allocate that state elsewhere first.",
            )
    own = {n for m in mine for n, v in m.attrs.items() if isinstance(v, Tensor) and v.op == "cache"}
    for node in ast.walk(func):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in own:
            raise _fail(
                owner.file,
                node,
                "KV275",
                f"`init_cache` also sets `{node.attr}`; the paged engine will not call it.",
                "Set it in __init__ or in forward first.",
            )
    return func, owner.file
