"""Latent attention of a standalone model: the seam replaced by the absorbed form over a paged pair of caches."""

from __future__ import annotations

from kvskill.analyzer.modeling.facts import AttentionFacts
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.mla import ABSORBED, METHOD, absorb_context, fits, one_head, size_context
from kvskill.implementer.render import render
from kvskill.implementer.standalone.attention import cache_exprs, flat, put_back, rows_of, thread
from kvskill.implementer.textops import insert_after, insert_before

__all__ = ["convert_latent"]

# fresh names of the template
_LOCALS = ["rows", "q_nope", "q_rope", "latent", "k_rope", "nope_cache", "rope_cache", "slots", "kv", "packed"]


def convert_latent(ctx: Context, facts: AttentionFacts) -> None:
    """All edits of one latent attention class."""
    mla, seam = facts.mla, facts.seam
    assert mla is not None
    file, func, me = seam.file, seam.func, seam.self_name
    torch = ctx.torch_name(file)
    if torch is None or not fits(ctx, facts, mla):
        return
    caches, meta = cache_exprs(ctx, facts), thread(ctx, facts)
    parts = [
        flat(ctx, seam, mla.q_nope, seam.heads_expr, mla.nope),
        flat(ctx, seam, mla.q_rope, seam.heads_expr, mla.rope),
        flat(ctx, seam, one_head(mla.latent), "1", mla.rank),
        flat(ctx, seam, one_head(mla.k_rope), "1", mla.rope),
    ]
    rows, after = rows_of(ctx, seam, mla.q_nope), put_back(ctx, seam)
    if caches is None or meta is None or rows is None or after is None or None in parts:
        return
    latent = parts[2] if mla.normed else f"{me}.{mla.norm}({parts[2]})"
    n = {name: ctx.fresh_name(func, f"paged_{name}") for name in _LOCALS}
    text = render(
        "standalone/latent_attend",
        fa_version=ctx.manifest.fa_version.value,
        n=n,
        rows=rows[0],
        cols=rows[1],
        q_nope=parts[0],
        q_rope=parts[1],
        latent=latent,
        k_rope=parts[3],
        nope_cache=caches[0],
        rope_cache=caches[1],
        meta=meta,
        torch=torch,
        **size_context(facts, mla),
        method=METHOD,
        absorbed_k=ABSORBED[0],
        absorbed_v=ABSORBED[1],
        out={"name": seam.out.name},
        after=after,
        extra=seam.extra if seam.extra != "_" else "",
    )
    insert_before(ctx.edit_set(file), seam.anchor, text, "paged latent attention", ctx.unit(func, file))
    ctx.bound_at.setdefault(id(func), []).append((seam.anchor.lineno, {seam.out.name, *seam.extra_targets[:1]}))
    names = {mla.q_nope.name, mla.q_rope.name, mla.latent.name, mla.k_rope.name}
    ctx.use_at(func, seam.anchor.lineno, names | caches[2])
    ctx.use(func, {meta, me})
    ctx.remove_seam(seam)
    _declare(ctx, facts)


def _declare(ctx: Context, facts: AttentionFacts) -> None:
    """The absorbed halves as attributes, and the method that makes them."""
    mla = facts.mla
    assert mla is not None
    found = facts.cls.method("__init__")
    if found is None or found[1] is not facts.cls:
        ctx.refuse(
            facts.file,
            facts.cls.node,
            "KV292",
            f"{facts.cls.name} has no __init__ of its own to keep the absorbed weights.",
            "Give the class an __init__.",
        )
        return
    init, owner = found
    me = init.args.args[0].arg
    torch = ctx.torch_name(owner.file)
    if torch is None:
        return
    lines = "# halves of the up projection, filled before the first prompt\n"
    lines += f"{me}.{ABSORBED[0]} = {me}.{ABSORBED[1]} = None\n"
    method = render("standalone/latent_absorb", torch=torch, **absorb_context(facts, mla, me))
    edits, unit = ctx.edit_set(owner.file), ctx.unit(init, owner.file)
    insert_after(edits, init.body[-1], lines, "absorbed weights", unit)
    insert_after(edits, init, "\n" + method, "absorbed weights", unit)
