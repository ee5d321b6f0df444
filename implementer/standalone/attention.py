"""The attention of a standalone model: the seam replaced, and the step's metadata threaded down to it."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.facts import AttentionFacts, Binding, Seam
from kvskill.analyzer.modeling.values import Const, Frame, Instance, Tensor, Tup, Value
from kvskill.implementer.framework.attention import attend_context
from kvskill.implementer.framework.calls import add_argument, add_parameter
from kvskill.implementer.framework.context import Context
from kvskill.implementer.render import render
from kvskill.implementer.textops import insert_before

__all__ = ["META", "cache_exprs", "convert_attention", "flat", "put_back", "rows_of", "thread"]

META = "forward_metadata"  # the name under which the step travels

# fresh names of the template
_LOCALS = [
    "rows", "query", "key", "value", "key_cache", "value_cache", "slots", "kv_lengths", "table", "block_size", "packed",
]  # fmt: skip


def convert_attention(ctx: Context, facts: AttentionFacts) -> None:
    """All edits of one attention class."""
    seam = facts.seam
    file, func = seam.file, seam.func
    torch = ctx.torch_name(file)
    if torch is None:
        return
    caches, meta = cache_exprs(ctx, facts), thread(ctx, facts)
    query = flat(ctx, seam, seam.q, seam.heads_expr, seam.k_dim_expr)
    key = flat(ctx, seam, seam.k, seam.kv_heads_expr, seam.k_dim_expr)
    value = flat(ctx, seam, seam.v, seam.kv_heads_expr, seam.v_dim_expr)
    rows, after = rows_of(ctx, seam, seam.q), put_back(ctx, seam)
    if caches is None or meta is None or rows is None or after is None or None in (query, key, value):
        return
    n = {name: ctx.fresh_name(func, f"paged_{name}") for name in _LOCALS}
    if facts.window is not None and facts.window.attr is None:
        ctx.refuse(
            file,
            facts.cls.node,
            "KV203",
            f"The window of {facts.cls.name} is not held by an attribute.",
            "Keep the window of each layer in an attribute that is None for full layers.",
        )
        return
    context = attend_context(ctx, facts, torch, meta) | {
        "n": n,
        "rows": rows[0],
        "cols": rows[1],
        "q": query,
        "k": key,
        "v": value,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "window": f"{seam.self_name}.{facts.window.attr}" if facts.window is not None else None,
        "after": after,
    }
    text = render("standalone/attend", **context)
    insert_before(ctx.edit_set(file), seam.anchor, text, "paged attention", ctx.unit(func, file))
    ctx.bound_at.setdefault(id(func), []).append((seam.anchor.lineno, {seam.out.name, *filter(None, [seam.extra])}))
    ctx.use_at(func, seam.anchor.lineno, {seam.q.name, seam.k.name, seam.v.name} | caches[2])
    ctx.use(func, {meta, seam.self_name})
    ctx.remove_seam(seam)


def flat(ctx: Context, seam: Seam, binding: Binding, heads: str, dim: str) -> str | None:
    """The value as [B * S, heads, dim]; a refusal when its axes are others than the known ones."""
    x = binding.name
    if binding.layout == "BSND":
        return f"{x}.flatten(0, 1)"
    if binding.layout == "BNSD":
        return f"{x}.transpose(1, 2).flatten(0, 1)"
    if binding.layout == "BSH":
        return f"{x}.reshape(-1, {heads}, {dim})"
    if binding.layout in ("TND", "TH"):  # B * S flattened already
        return f"{x}.view(-1, {heads}, {dim})"
    _layout(ctx, seam, binding)
    return None


def rows_of(ctx: Context, seam: Seam, binding: Binding) -> tuple[str, str] | None:
    """Expressions of B and S."""
    x = binding.name
    axis = {"BSND": 1, "BSH": 1, "BNSD": 2}.get(binding.layout)
    if axis is None:
        _layout(ctx, seam, binding)
        return None
    return f"{x}.shape[0]", f"{x}.shape[{axis}]"


def put_back(ctx: Context, seam: Seam) -> str | None:
    """From [B, S, N, D] to what the following code expects."""
    known = {
        "BSND": "",
        "BNSD": ".transpose(1, 2)",
        "BSH": ".flatten(2)",
        "TND": ".flatten(0, 1)",
        "TH": ".flatten(2).flatten(0, 1)",
    }
    if seam.out.layout not in known:
        _layout(ctx, seam, seam.out)
    return known.get(seam.out.layout)


def _layout(ctx: Context, seam: Seam, binding: Binding) -> None:
    ctx.refuse(
        seam.file,
        seam.anchor,
        "KV291",
        f"`{binding.name}` stands here as {binding.layout}, from which the padded rows are not found.",
        "Keep it as [B, S, N, D], [B, N, S, D] or [B, S, N * D] until the cache is written.",
    )


def cache_exprs(ctx: Context, facts: AttentionFacts) -> tuple[str, str, set[str]] | None:
    """How the seam's function reaches its K and V cache before the anchor; the same in every run and layer;
    the names in it.
    """
    seam = facts.seam
    frames = [f for f in ctx.frames_of(seam.func) if f.self_ is not None]
    found: list[str] = []
    for name in (seam.k_cache, seam.v_cache):
        options: set[str] | None = None
        for frame in frames:
            here = _reach(frame, seam.anchor, seam.self_name, name)
            options = here if options is None else options & here
        if not options:
            ctx.refuse(
                seam.file,
                seam.anchor,
                "KV291",
                f"{facts.cls.name} does not reach its {name.upper()} cache by a plain expression here.",
                "Take the layer's pair of caches, or all pairs and an attribute `layer_idx`, as arguments.",
            )
            return None
        found.append(min(options, key=lambda e: (len(e), e)))
    names = {m.id for e in found for m in ast.walk(ast.parse(e)) if isinstance(m, ast.Name)}
    return found[0], found[1], names


def _reach(frame: Frame, anchor: ast.stmt, me: str, name: str) -> set[str]:
    out: set[str] = set()
    inst = frame.self_
    for var, value in frame.env_before.get(id(anchor), {}).items():
        if _is(value, inst, name):
            out.add(var)
        if not isinstance(value, Tup):
            continue
        for i, item in enumerate(value.items):
            if _is(item, inst, name):
                out.add(f"{var}[{i}]")
            if not isinstance(item, Tup):
                continue
            for j, inner in enumerate(item.items):
                if _is(inner, inst, name) and isinstance(inst, Instance):
                    out |= {f"{var}[{me}.{a}][{j}]" for a, v in inst.attrs.items() if v == Const(i)}
    return out


def _is(value: Value, inst: Value | None, name: str) -> bool:
    return (
        isinstance(value, Tensor)
        and value.op == "cache"
        and value.attrs.get("name") == name
        and value.attrs.get("owner") is inst
    )


def thread(ctx: Context, facts: AttentionFacts) -> str | None:
    """Add a `forward_metadata` parameter from the entry's forward down to the seam; returns its name there."""
    seam = facts.seam
    name = META
    for frame in ctx.frames_of(seam.func):
        current: Frame | None = frame
        while current is not None:
            func = current.func
            if not isinstance(func, ast.FunctionDef):
                return None
            taken = {a.arg for a in [*func.args.posonlyargs, *func.args.args, *func.args.kwonlyargs]}
            if name not in taken:
                add_parameter(ctx, current.file, func, name)
            ctx.use(func, {name})
            parent, call = current.parent, current.call
            if parent is not None and isinstance(call, ast.Call):
                if not any(k.arg == name for k in call.keywords):
                    add_argument(ctx, parent.file, call, name, name)
            elif parent is not None:
                ctx.refuse(
                    parent.file,
                    current.call or func,
                    "KV211",
                    "The forward metadata does not reach the attention.",
                    "Call the layer directly.",
                )
                return None
            current = parent
    return name
