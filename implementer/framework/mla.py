"""Latent attention (MLA): the seam replaced by the absorbed form, the latent and rope caches declared as entries."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.modeling.facts import AttentionFacts, Binding, Seam
from kvskill.analyzer.modeling.mla import MlaFacts
from kvskill.analyzer.modeling.mla_rope import FusedWrite
from kvskill.analyzer.modeling.values import Const, ExtInstance, Func
from kvskill.analyzer.selection.limits import limits_for
from kvskill.implementer.framework.attention import _graph_test, adapt_block, from_tnd, init_expr, to_tnd
from kvskill.implementer.framework.context import Context
from kvskill.implementer.render import render
from kvskill.implementer.textops import (
    insert_after,
    insert_before,
    line_bounds,
    names_read,
    replace_statement,
    statements,
    whole_removal,
)

__all__ = [
    "ABSORBED",
    "METHOD",
    "absorb_context",
    "convert_mla",
    "fits",
    "leftover_caches",
    "one_head",
    "size_context",
    "splits",
]

ABSORBED = ("absorbed_k", "absorbed_v")  # attributes that hold the two halves of the up projection
METHOD = "split_up_projection"
CACHES = ("nope_cache", "rope_cache")
_NAMES = (
    *("q_nope", "q_rope", "k_rope", "latent", "kv", "slots", "q_lengths", "kv_lengths", "table"),
    *("block_size", "blocks", "draft", "ops", "raw"),
)


def convert_mla(ctx: Context, facts: AttentionFacts, meta: str, meta_twin: str = "") -> None:
    """All edits of one latent attention class.

    `meta` names the forward metadata in the seam's function, `meta_twin` in the one that decode has of its own.
    """
    mla = facts.mla
    assert mla is not None
    if not fits(ctx, facts, mla):
        return
    fused = mla.fused if ctx.manifest.overrides.mla_cache != "nd" else None
    if fused is None and mla.only_fused:
        ctx.refuse(
            facts.file,
            facts.seam.anchor,
            "KV278",
            "An ND cache was asked for, and the code has no norm and rotary of its own beside the fused write.",
            "Use `overrides.mla_cache: nz`.",
        )
        return
    if fused is None and ctx.manifest.overrides.mla_cache == "nz":
        ctx.refuse(
            facts.file,
            facts.seam.anchor,
            "KV278",
            f"An NZ cache was asked for, but the fused write cannot be used: {mla.why_not_fused}.",
            "Use `overrides.mla_cache: nd`.",
        )
        return
    if fused is None and mla.fused is None:
        ctx.optional(
            facts.file,
            facts.seam.anchor,
            "KV279",
            f"The latent is written by slot into an ND cache, not by the fused operator: {mla.why_not_fused}.",
            "The result agrees without it; change the code if you want the fused write.",
        )
    _replace(ctx, facts, facts.seam, mla, fused, meta)
    if mla.twin is not None:
        seam, twin = mla.twin
        _replace(ctx, facts, seam, twin, twin.fused if fused is not None else None, meta_twin)
    adapt_block(ctx, Func(facts.entry, facts.file, facts.cls), facts.stream_params, facts.reps)
    _declare(ctx, facts, mla)
    _drop_init_cache(ctx, mla)


def fits(ctx: Context, facts: AttentionFacts, mla: MlaFacts) -> bool:
    """The operator's sizes and what absorption needs; each miss is a refusal."""
    limits = limits_for(ctx.manifest.target.torch_npu)
    v = mla.values
    expanded = limits["mla_expanded"]
    bad: list[str] = []
    for what, name, allowed in (
        ("latent size", "rank", limits["mla_latent"]),
        ("rope size", "rope", limits["mla_rope"]),
        ("number of query heads per rank", "heads", limits["mla_q_heads"]),
        ("nope size", "nope", expanded["nope"]),
        ("value size", "v", expanded["v"]),
    ):
        if v[name] not in allowed:
            bad.append(f"{what} {v[name]} (allowed: {', '.join(map(str, allowed))})")
    if bad:
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV277",
            f"The operator does not take {facts.cls.name}'s {'; '.join(bad)} ({limits.profile}).",
            "Keep the Legacy cache, or pad by hand.",
        )
    if splits(mla) and mla.up is None:
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV270",
            f"{facts.cls.name} multiplies by halves of the up projection in one phase and by neither in the other.",
            "Use the halves in both phases, or the projection in both.",
        )
        return False
    module = facts.reps[0].attrs.get(mla.up) if mla.up is not None else None
    if mla.up is not None and not (isinstance(module, ExtInstance) and module.kwargs.get("bias") == Const(False)):
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV289",
            f"`{mla.up}` may have a bias; the absorbed form has no place for one.",
            "Build it with bias=False.",
        )
        return False
    if ctx.manifest.overrides.mla_prefill == "absorbed":
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV281",
            "Absorbed prefill was asked for; only expanded prefill is generated.",
            "Drop `overrides.mla_prefill`, or write this phase by hand.",
        )
        return False
    own = ABSORBED if splits(mla) else ()
    taken = [n for n in (*own, *CACHES) if n in facts.reps[0].attrs and n not in mla.caches]
    if taken or (splits(mla) and facts.cls.method(METHOD) is not None):
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV294",
            f"{facts.cls.name} already uses the name `{taken[0] if taken else METHOD}` for something else.",
            "Rename it.",
        )
        return False
    return not bad


def splits(mla: MlaFacts) -> bool:
    """Must the class split its up projection? Not where all the code that multiplies by halves has its own."""
    late = mla.twin[1] if mla.twin is not None else mla
    return late.halves is None


def _replace(
    ctx: Context, facts: AttentionFacts, seam: Seam, mla: MlaFacts, fused: FusedWrite | None, meta: str
) -> None:
    file, func = seam.file, seam.func
    torch = ctx.torch_name(file)
    if torch is None:
        return
    me = seam.self_name
    n = {name: ctx.fresh_name(func, f"paged_{name}") for name in _NAMES}
    unit = ctx.unit(func, file)
    edits = ctx.edit_set(file)
    raw = ""
    if fused is not None:
        raw = fused.raw
        if _rebound(func, fused, seam.anchor):
            raw = n["raw"]
            insert_after(edits, fused.source, f"{raw} = {fused.raw}\n", "the projection's output as a whole", unit)
            ctx.use_at(func, (fused.source.end_lineno or fused.source.lineno) + 1, names_in(fused.raw))
    latent = _rows(mla.latent, mla.rank)
    if not mla.normed:
        latent = f"{me}.{mla.norm}({latent})"
    text = render(
        "framework/mla_attend",
        fa_version=ctx.manifest.fa_version.value,
        rope_op_version=ctx.manifest.target.kv_rmsnorm_rope_version,
        n=n,
        q_nope=to_tnd(mla.q_nope, seam.heads_expr, mla.rank if mla.absorbed else mla.nope),
        q_rope=to_tnd(mla.q_rope, seam.heads_expr, mla.rope),
        latent=latent,
        k_rope=_rows(mla.k_rope, mla.rope),
        raw=raw,
        fused=fused,
        meta=meta,
        key=f"{me}.attn_type",
        torch=torch,
        **size_context(facts, mla),
        absorbed_k=(mla.halves or ABSORBED)[0],
        absorbed_v=(mla.halves or ABSORBED)[1],
        halves=mla.halves is not None,
        absorbed=mla.absorbed,
        phase=mla.phase,
        host_lists="actual_seq_lengths_list_kv" in ctx.manifest.target.forward_metadata_fields,
        graph_test=_graph_test(ctx, facts),
        torchair=ctx.module_name(file, "torchair") or "torchair",
        extra=seam.extra,
        out={"name": seam.out.name, "text": _outcome(seam.out, mla.absorbed)},
    )
    insert_before(edits, seam.anchor, text, "paged latent attention", unit)
    line = seam.anchor.lineno
    ctx.bound_at.setdefault(id(func), []).append((line, {seam.out.name, *seam.extra_targets[:1]}))
    read = {mla.q_nope.name, mla.q_rope.name}
    if fused is not None:
        read |= {*names_in(raw), *names_in(fused.cos), *names_in(fused.sin), *names_in(fused.gamma)} - {me}
    else:
        read |= {mla.latent.name, mla.k_rope.name}
    ctx.use_at(func, line, read)
    ctx.use(func, {meta.split("[")[0].split(".")[0], me})
    ctx.remove_seam(seam)


def _outcome(out: Binding, absorbed: bool) -> str:
    """What the code that follows reads: the template gives [T, N, v], or [N, T, rank] where absorbed."""
    if not absorbed:
        return from_tnd(out)
    return out.name if out.layout == "NTD" else from_tnd(Binding(f"{out.name}.transpose(0, 1)", out.layout))


def names_in(expr: str) -> set[str]:
    """Names that an expression reads."""
    return names_read([ast.parse(expr, mode="eval")])


def _rows(binding: Binding, dim: str) -> str:
    """A one-head value as contiguous [T, 1, dim]."""
    return to_tnd(one_head(binding), "1", dim)


def one_head(binding: Binding) -> Binding:
    """The part that all heads share: of copies along the head axis, the first."""
    if not binding.copies:
        return binding
    first = {"BSND": "[:, :, :1]", "BNSD": "[:, :1]", "TND": "[:, :1]", "NTD": "[:1]"}[binding.layout]
    return replace(binding, name=binding.name + first, copies=False)


def size_context(facts: AttentionFacts, mla: MlaFacts) -> dict[str, Any]:
    """What the attend templates of both deployments read of the sizes and the projections."""
    seam = facts.seam
    return {
        "me": seam.self_name,
        "up": mla.up,
        "heads": seam.heads_expr,
        "rank": mla.rank,
        "nope": mla.nope,
        "rope": mla.rope,
        "v": mla.v,
        "scale": seam.scale_expr,
    }


def absorb_context(facts: AttentionFacts, mla: MlaFacts, me: str) -> dict[str, Any]:
    """What the absorb templates of both deployments read; `me` is what `__init__` calls the object."""
    sizes = {"heads": facts.seam.heads_expr, "rank": mla.rank, "nope": mla.nope, "v": mla.v}
    return {
        "me": me,
        "method": METHOD,
        "up": mla.up,
        "absorbed_k": ABSORBED[0],
        "absorbed_v": ABSORBED[1],
        **{name: _own(expr, facts, me) for name, expr in sizes.items()},
    }


def _rebound(func: ast.FunctionDef, fused: FusedWrite, anchor: ast.stmt) -> bool:
    """Does the projection's output need a name of its own, kept until the new code?"""
    if fused.inline:
        return False
    return not fused.raw.isidentifier() or any(
        isinstance(n, ast.Name)
        and isinstance(n.ctx, ast.Store)
        and n.id == fused.raw
        and (fused.source.end_lineno or 0) < n.lineno < anchor.lineno
        for n in ast.walk(func)
    )


def _declare(ctx: Context, facts: AttentionFacts, mla: MlaFacts) -> None:
    """Entries at the end of `__init__`, then the method that splits the up projection; the old declarations go."""
    file = facts.file
    found = facts.cls.method("__init__")
    if found is None:
        ctx.refuse(file, facts.cls.node, "KV202", f"{facts.cls.name} has no __init__.", "Declare its caches there.")
        return
    init, owner = found
    me = init.args.args[0].arg
    torch = ctx.module_name(owner.file, "torch") or "torch"
    infer = init_expr(ctx, facts.reps[0], "infer")
    block_size = None
    if ctx.manifest.target.block_size_on == "entry" and infer is not None:
        block_size = f"{infer}.scheduler_config.block_size"
    lines = [f"{me}.{name} = {torch}.Tensor([])" for name in CACHES if name not in mla.caches]
    if splits(mla):
        lines.append("# halves of the up projection, filled after loading")
        lines.append(f"{me}.{ABSORBED[0]} = {me}.{ABSORBED[1]} = None")
    if _graph_test(ctx, facts):
        lines.append(f'{me}.paged_ge_graph = {infer}.model_config.exe_mode == "ge_graph"')
    entries = render(
        "framework/cache_entries",
        me=me,
        attn_type='"FullAttention"',
        manager_key=None,
        caches=[
            {"name": CACHES[0], "dim": _own(mla.rank, facts, me)},
            {"name": CACHES[1], "dim": _own(mla.rope, facts, me)},
        ],
        kv_heads="1",
        dtype=f"{torch}.{load_yaml('target_profile.yaml')['run_dtype']}",
        block_size=block_size,
        window=None,
    )
    ctx.imports.setdefault(owner.file.shown, set()).add("CacheEntry")
    edits = ctx.edit_set(owner.file)
    method = render("framework/mla_absorb", **absorb_context(facts, mla, me)) if splits(mla) else ""
    unit = ctx.unit(init, owner.file)
    gone = _placeholders(init, me, {*mla.caches, *mla.tables} - set(CACHES))
    if facts.caches.unit is not None:
        gone.add(facts.caches.unit)
    text = "\n".join(lines) + "\n" + entries
    last = init.body[-1]
    if last in gone:  # its place is taken, so that no removal reaches over the new text
        replace_statement(edits, last, text, "latent cache entries", unit)
        ctx.rewritten.setdefault(id(init), set()).add(last)
        gone.discard(last)
    else:
        insert_after(edits, last, text, "latent cache entries", unit)
    if method:
        insert_after(edits, init, "\n" + method, "absorbed weights", unit)
    if gone:
        ctx.mark_removed(Func(init, owner.file, owner), gone)


def _placeholders(init: ast.FunctionDef, me: str, names: set[str]) -> set[ast.stmt]:
    """The statements of `__init__` that set nothing but these attributes."""
    out: set[ast.stmt] = set()
    for stmt in statements(init.body):
        if not isinstance(stmt, ast.Assign):
            continue
        targets = [t for target in stmt.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if all(
            isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == me and t.attr in names
            for t in targets
        ):
            out.add(stmt)
    return out


def _own(expr: str, facts: AttentionFacts, me: str) -> str:
    return re.sub(rf"\b{re.escape(facts.seam.self_name)}\.", f"{me}.", expr)


def _drop_init_cache(ctx: Context, mla: MlaFacts) -> None:
    """The model's own allocation goes: the paged engine allocates through the entries."""
    if mla.init_cache is None:
        return
    func, file = mla.init_cache
    bounds = line_bounds(file, func)
    if bounds is None:
        ctx.refuse(file, func, "KV295", "`init_cache` shares a line with other code.", "Put it on lines of its own.")
        return
    start, end = bounds
    while (stop := file.raw.find(b"\n", end)) >= 0 and not file.raw[end:stop].strip():
        end = stop + 1
    ctx.edit_set(file).add(start, end, "", "the engine allocates the caches")


def leftover_caches(ctx: Context) -> None:
    """No use of the Legacy caches may be left outside what was removed."""
    names = {
        name: facts
        for facts in ctx.facts.attentions
        if facts.mla is not None
        for name in (*facts.mla.caches, *facts.mla.tables)
        if name not in CACHES
    }
    if not names:
        return
    gone: set[int] = set()
    for key, func in ctx.functions.items():
        assert isinstance(func.node, ast.FunctionDef)
        for stmt in whole_removal(func.node.body, ctx.removed.get(key, set())):
            gone.update(id(n) for n in ast.walk(stmt))
    for stmts in ctx.rewritten.values():
        gone.update(id(n) for stmt in stmts for n in ast.walk(stmt))
    for cls in ctx.facts.program.classes():
        gone.update(id(n) for item in cls.node.body if id(item) in ctx.unrun for n in ast.walk(item))
    for facts in names.values():
        if facts.mla is not None and facts.mla.init_cache is not None:
            gone.update(id(n) for n in ast.walk(facts.mla.init_cache[0]))
    classes = {c for facts in names.values() for c in facts.cls.mro()}
    for cls in classes:
        for node in ast.walk(cls.node):
            if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in gone:
                ctx.refuse(
                    cls.file,
                    node,
                    "KV276",
                    f"`{node.attr}` is still used here, outside the code that was replaced.",
                    "Remove this use of the Legacy cache.",
                )
