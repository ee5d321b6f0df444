"""The attention class: seam replaced by the template, packed tokens seen as one row, caches declared as entries."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.facts import AttentionFacts, Binding, CacheDecl
from kvskill.analyzer.modeling.values import (
    ClassVal,
    Const,
    Frame,
    Func,
    Instance,
    Ref,
    Tensor,
    Tup,
    Unknown,
    Value,
)
from kvskill.implementer.framework.context import Context
from kvskill.implementer.render import render
from kvskill.implementer.textops import (
    body_start,
    insert_after,
    insert_before,
    reindent,
    replace_statement,
    wrap_expr,
)
from kvskill.source import SourceFile

_LOCALS = (
    "query",
    "key",
    "value",
    "slots",
    "q_lengths",
    "kv_lengths",
    "table",
    "block_size",
    "ops",
    "parts",
    "part",
    "one",
    "many",
    "sizes",
    "rows",
)

__all__ = ["adapt_block", "attend_context", "convert_attention", "from_tnd", "to_tnd"]


def to_tnd(binding: Binding, heads: str, dim: str) -> str:
    """The binding as contiguous [T, heads, dim]; one row of T tokens stands where the batch was."""
    x = binding.name
    if binding.layout == "BSND":
        return f"{x}.flatten(0, 1).contiguous()"
    if binding.layout == "BNSD":
        return f"{x}.transpose(1, 2).flatten(0, 1).contiguous()"
    if binding.layout == "NTD":
        return f"{x}.transpose(0, 1).contiguous()"
    if binding.layout == "TND":
        return f"{x}.contiguous()"
    return f"{x}.reshape(-1, {heads}, {dim}).contiguous()"


def from_tnd(binding: Binding) -> str:
    """[T, heads, dim] in the layout that the following code expects."""
    x = binding.name
    return {
        "BSND": f"{x}.unsqueeze(0)",
        "BNSD": f"{x}.transpose(0, 1).unsqueeze(0)",
        "NTD": f"{x}.transpose(0, 1)",
        "TND": x,
        "BSH": f"{x}.flatten(1).unsqueeze(0)",
        "TH": f"{x}.flatten(1)",
    }[binding.layout]


def convert_attention(ctx: Context, facts: AttentionFacts, meta: str) -> None:
    """All edits of one attention class. `meta` names the forward metadata in the seam's function."""
    _replace_seam(ctx, facts, meta)
    if ctx.facts.form == "paged":
        return
    adapt_block(ctx, Func(facts.entry, facts.file, facts.cls), facts.stream_params, facts.reps)
    _declare(ctx, facts)


def attend_context(ctx: Context, facts: AttentionFacts, torch: str, meta: str) -> dict[str, Any]:
    """What the attend templates of both deployments read of the seam and the manifest."""
    seam = facts.seam
    return {
        "fa_version": ctx.manifest.fa_version.value,
        "window_rule": ctx.manifest.window_rule.value,
        "meta": meta,
        "torch": torch,
        "heads": seam.heads_expr,
        "kv_heads": seam.kv_heads_expr,
        "k_dim": seam.k_dim_expr,
        "v_dim": seam.v_dim_expr,
        "scale": seam.scale_expr,
        "sinks": seam.sinks_expr,
        "sliding": facts.window.sliding if facts.window is not None else None,
        "extra": seam.extra,
        "out": {"name": seam.out.name},
    }


def _replace_seam(ctx: Context, facts: AttentionFacts, meta: str) -> None:
    seam = facts.seam
    file, func = seam.file, seam.func
    torch = ctx.torch_name(file)
    if torch is None:
        return
    n = {name: ctx.fresh_name(func, f"paged_{name}") for name in _LOCALS}
    context = attend_context(ctx, facts, torch, meta) | {
        "n": n,
        "q": to_tnd(seam.q, seam.heads_expr, seam.k_dim_expr),
        "k": to_tnd(seam.k, seam.kv_heads_expr, seam.k_dim_expr),
        "v": to_tnd(seam.v, seam.kv_heads_expr, seam.v_dim_expr),
        "key": f"{seam.self_name}.{'manager_key' if keyed(ctx, facts) else 'attn_type'}",
        "manager_key": keyed(ctx, facts),
        "me": seam.self_name,
        "k_cache": seam.k_cache,
        "v_cache": seam.v_cache,
        "window": _window_text(ctx, facts),
        "host_lists": "actual_seq_lengths_list_kv" in ctx.manifest.target.forward_metadata_fields,
        "graph_test": _graph_test(ctx, facts),
        "torchair": ctx.module_name(file, "torchair") or "torchair",
    }
    text = render("framework/attend_head", **context)
    dense = dense_layers(ctx, facts)
    if dense and seam.sinks_expr is not None:
        ctx.refuse(
            file, func, "KV205", "Attention sinks need the packed layout, which this head size has not.", "Keep Legacy."
        )
        return
    if not dense:
        text += render("framework/attend", **context)
    elif len(dense) == len(facts.layers):
        text += render("framework/attend_dense", **context)
    else:
        text += f"if {seam.self_name}.paged_dense:\n"
        text += reindent(render("framework/attend_dense", **context), "    ")
        text += "else:\n"
        text += reindent(render("framework/attend", **context), "    ")
    after = from_tnd(seam.out)
    if after != seam.out.name:
        text += f"{seam.out.name} = {after}\n"
    unit = ctx.unit(func, file)
    insert_before(ctx.edit_set(file), seam.anchor, text, "paged attention", unit)
    ctx.bound_at.setdefault(id(func), []).append((seam.anchor.lineno, {seam.out.name, *filter(None, [seam.extra])}))
    ctx.use_at(func, seam.anchor.lineno, {seam.q.name, seam.k.name, seam.v.name})
    ctx.use(func, {meta.split("[")[0].split(".")[0], seam.self_name})
    ctx.remove_seam(seam)


def dense_layers(ctx: Context, facts: AttentionFacts) -> tuple[int, ...]:
    """Layers of the class whose head size the packed layout rejects, by the manifest's groups."""
    routes: dict[int, str] = {}
    for group in ctx.manifest.groups:
        for layer in group.layers:
            routes[layer] = group.prefill.layout if group.prefill is not None else "TND"
    return tuple(i for i in facts.layers if routes.get(i, "TND") == "BNSD")


def keyed(ctx: Context, facts: AttentionFacts) -> bool:
    """Do the groups of the class need manager keys of their own?"""
    return any(g.manager_key for g in ctx.manifest.groups if set(g.layers) & set(facts.layers))


def _graph_test(ctx: Context, facts: AttentionFacts) -> str | None:
    """The attribute that says ge_graph, when the file has torchair and the class can know the mode."""
    if ctx.module_name(facts.seam.file, "torchair") is None:
        return None
    known = all(init_expr(ctx, rep, "infer") for rep in facts.reps)
    return f"{facts.seam.self_name}.paged_ge_graph" if known else None


def init_expr(ctx: Context, inst: Instance, path: str) -> str | None:
    """A name or `self.attr` that holds a root object (`config`, `infer`) in the object's `__init__`."""
    assert ctx.facts.prefill is not None
    env = ctx.facts.prefill.init_env.get(id(inst), {})
    for name, value in env.items():
        if value == Ref(path):
            return name
    for name, value in inst.attrs.items():
        if value == Ref(path):
            return f"self.{name}"
    return None


def _window_text(ctx: Context, facts: AttentionFacts) -> str | None:
    if facts.window is None:
        return None
    attr = facts.window.attr or "paged_window"
    return f"{facts.seam.self_name}.{attr}"


def _declare(ctx: Context, facts: AttentionFacts) -> None:
    """Replace `cache_unit` by cache entries, chained placeholders by two, in the `__init__` of each class."""
    taken: set[int] = set()  # declarations that another class's `__init__` has replaced already
    decls = [(d, d.cls or facts.cls) for d in facts.decls or (facts.caches,)]
    for decl, cls in sorted(decls, key=lambda x: not _in_init(x[1], x[0].unit)):
        rep = next((r for r in facts.reps if r.cls is cls), facts.reps[0])
        _declare_in(ctx, facts, replace(decl, unit=None) if id(decl.unit) in taken else decl, cls, rep)
        taken.add(id(decl.unit))


def _in_init(cls: ClassVal, unit: ast.stmt | None) -> bool:
    found = cls.method("__init__")
    return found is not None and unit in found[0].body


def _declare_in(ctx: Context, facts: AttentionFacts, decl: CacheDecl, cls: ClassVal, rep: Instance) -> None:
    found = cls.method("__init__")
    if found is None:
        ctx.refuse(cls.file, cls.node, "KV202", f"{cls.name} has no __init__.", "Declare its caches there.")
        return
    init, owner = found
    file = owner.file
    self_name = init.args.args[0].arg
    edits = ctx.edit_set(file)
    unit = ctx.unit(init, file)
    target = ctx.manifest.target
    window = attn_type = None
    lines: list[str] = []
    if facts.window is not None:
        if facts.window.attr is None:
            expr = _init_names(ctx, facts, facts.window.expr)
            if expr is None:
                ctx.refuse(
                    file,
                    init,
                    "KV203",
                    f"`{facts.window.expr}` cannot be written in __init__ of {cls.name}.",
                    "Keep the window of each layer in an attribute that is None for full layers.",
                )
                return
            lines.append(f"{self_name}.paged_window = {expr}")
            window = f"{self_name}.paged_window"
        else:
            window = f"{self_name}.{facts.window.attr}"
        always = all(facts.window.per_layer)
        attn_type = '"SlidingWindow"' if always else f'"SlidingWindow" if {window} else "FullAttention"'
        if not always:
            window = f"{window} or None"
    infer = init_expr(ctx, rep, "infer")
    block_size = None
    if target.block_size_on == "entry" and infer is not None:
        block_size = f"{infer}.scheduler_config.block_size"
    if _graph_test(ctx, facts):
        lines.append(f'{self_name}.paged_ge_graph = {infer}.model_config.exe_mode == "ge_graph"')
    dense = dense_layers(ctx, facts)
    if dense and len(dense) < len(facts.layers):
        sizes = sorted({g.k_head_dim for g in ctx.manifest.groups if set(g.layers) & set(dense)})
        packed = {g.k_head_dim for g in ctx.manifest.groups if set(g.layers) & set(facts.layers) - set(dense)}
        if packed & set(sizes):
            ctx.refuse(file, init, "KV206", "Layers of one head size need different layouts.", "Split the class.")
            return
        shown = ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
        lines.append(f"{self_name}.paged_dense = {decl.k_dim_expr} in ({shown})  # sizes without a packed layout")
    torch = ctx.module_name(file, "torch") or "torch"
    text = render(
        "framework/cache_entries",
        me=self_name,
        attn_type=attn_type or '"FullAttention"',
        manager_key=_manager_key(ctx, facts, window),
        caches=[
            {"name": facts.seam.k_cache, "dim": decl.k_dim_expr},
            {"name": facts.seam.v_cache, "dim": decl.v_dim_expr},
        ],
        kv_heads=decl.heads_expr,
        dtype=f"{torch}.{load_yaml('target_profile.yaml')['run_dtype']}",
        block_size=block_size,
        window=window,
    )
    if decl.holders:
        lines[:0] = [f"{self_name}.{name} = {torch}.Tensor([])" for name in (facts.seam.k_cache, facts.seam.v_cache)]
    text = "".join(f"{line}\n" for line in lines) + text
    ctx.imports.setdefault(file.shown, set()).add("CacheEntry")
    _two_placeholders(ctx, decl, cls)
    needed = _attrs_in(text, self_name)
    late = [
        s
        for name, s in rep.attr_nodes.items()
        if name in needed and (decl.unit is None or s.lineno > decl.unit.lineno) and name not in decl.placeholders
    ]
    if decl.unit is not None and not late and decl.unit in init.body:
        replace_statement(edits, decl.unit, text, "cache entries", unit)
        return
    home = _home(decl.unit_cls or cls, decl.unit) if decl.unit is not None else None
    if decl.unit is not None and home is not None:
        ctx.mark_removed(home, {decl.unit})
    insert_after(edits, init.body[-1], text, "cache entries", unit)


def _two_placeholders(ctx: Context, decl: CacheDecl, cls: ClassVal) -> None:
    """`self.k_cache = self.v_cache = ...` names one tensor twice: each cache gets its own, where they are set."""
    for stmt in {id(s): s for s in decl.placeholders.values()}.values():
        if not isinstance(stmt, ast.Assign) or (len(stmt.targets) == 1 and not isinstance(stmt.targets[0], ast.Tuple)):
            continue
        home = _home(cls, stmt)
        if home is None or id(stmt) in ctx.dropped_args:  # shared by classes: done once
            continue
        assert isinstance(home.node, ast.FunctionDef)
        ctx.dropped_args.add(id(stmt))
        me, torch = home.node.args.args[0].arg, ctx.module_name(home.file, "torch") or "torch"
        both = "\n".join(f"{me}.{name} = {torch}.Tensor([])" for name in decl.placeholders)
        unit = ctx.unit(home.node, home.file)
        replace_statement(ctx.edit_set(home.file), stmt, both + "\n", "one placeholder per cache", unit)


def _home(cls: ClassVal, stmt: ast.stmt) -> Func | None:
    """The method of the class, or of a base in the files, that holds a statement."""
    for owner in cls.mro():
        for item in owner.node.body:
            if isinstance(item, ast.FunctionDef) and any(n is stmt for n in ast.walk(item)):
                return Func(item, owner.file, owner)
    return None


def _manager_key(ctx: Context, facts: AttentionFacts, window: str | None) -> str | None:
    """An expression for the manager key, or None where the attention type is key enough.

    Two windows in one model, or two block sizes of one type, need keys; the window tells them apart.
    """
    if not keyed(ctx, facts):
        return None
    if window is None:
        return '"FullAttention"'
    return f'f"SlidingWindow{{{window}}}" if {window} else "FullAttention"'


def _attrs_in(text: str, self_name: str) -> set[str]:
    return set(re.findall(rf"\b{re.escape(self_name)}\.(\w+)", text))


def _init_names(ctx: Context, facts: AttentionFacts, expr: str) -> str | None:
    """Rewrite `config` and `layer_idx` of an expression to the names that `__init__` has."""
    tree = ast.parse(expr, mode="eval")
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    out = expr
    if "config" in names:
        config = init_expr(ctx, facts.reps[0], "config")
        if config is None:
            return None
        out = re.sub(r"\bconfig\.", f"{config}.", out)
    if "layer_idx" in names:
        index = _index_name(ctx, facts)
        if index is None:
            return None
        out = re.sub(r"\blayer_idx\b", index, out)
    return out


def _index_name(ctx: Context, facts: AttentionFacts) -> str | None:
    """The name that holds the layer index in `__init__`: equal to it in every representative."""
    assert ctx.facts.prefill is not None
    options: set[str] | None = None
    for inst in facts.reps:
        number = _layer_number(inst.path)
        env = ctx.facts.prefill.init_env.get(id(inst), {})
        here = {name for name, value in env.items() if value == Const(number)}
        here |= {f"self.{name}" for name, value in inst.attrs.items() if value == Const(number)}
        options = here if options is None else options & here
    ranked = sorted(options or (), key=lambda x: (x.startswith("self."), "layer" not in x, x))
    return ranked[0] if (ranked and len(facts.reps) > 1) or len(ranked) == 1 else None


def _layer_number(path: str) -> int | None:
    numbers = [int(p) for p in path.split(".") if p.isdigit()]
    return numbers[0] if numbers else None


def adapt_block(ctx: Context, func: Func, params: tuple[str, ...], objects: tuple[Instance, ...]) -> None:
    """Let a block that unpacks [B, S, H] work on packed [T, H]: one row going in, rows dropped coming out."""
    node, file = func.node, func.file
    assert isinstance(node, ast.FunctionDef)
    edits = ctx.edit_set(file)
    unit = ctx.unit(node, file)
    lines = [f"{p} = {p}.unsqueeze(0)" for p in params]
    if not lines:
        return
    lines[0] += "  # packed [T, H] as one row [1, T, H]"
    insert_before(edits, body_start(node), "\n".join(lines) + "\n", "packed tokens as one row", unit)
    frames = [
        f
        for f in ctx.frames_of(node)
        if f.self_ is None or not objects or f.self_ in objects or _same_class(f, objects)
    ]
    returns = [(stmt, value, f) for f in frames for stmt, value in f.returns if stmt is not None and stmt.value]
    given = [f.env_before.get(id(node.body[0]), {}).get(p) for f in frames for p in params]
    like = next((v for v in [*(v for _, v, _ in returns), *given] if isinstance(v, Tensor) and _hidden(v)), None)
    kinds: dict[int, set[str]] = {}
    for stmt, value, frame in returns:
        assert stmt is not None and stmt.value is not None
        kinds.setdefault(id(stmt), set()).add(kind := _sight(value, like))
        if kind == "clear":
            _squeeze(ctx, file, stmt.value, value, frame)
    certain = any("lost" in found for found in kinds.values()) or any(_hidden(v) for _, v, _ in returns)
    for stmt in {id(stmt): stmt for stmt, _, _ in returns}.values():
        assert stmt is not None and stmt.value is not None
        if "clear" in kinds[id(stmt)]:
            continue
        if certain and not isinstance(stmt.value, ast.Tuple):
            wrap_expr(edits, stmt.value, "", ".squeeze(0)", "rows dropped again")
            continue
        ctx.refuse(
            file,
            stmt,
            "KV207",
            "Whether this returns hidden states as [B, S, H] is not known.",
            "Keep the token axis visible: reshape to named sizes before the return.",
        )


def _hidden(value: object) -> bool:
    return isinstance(value, Tensor) and value.stream and value.rank == 3


def _sight(value: Value, like: Tensor | None) -> str:
    """clear: its axes are known; lost: hidden states by their axes, [B, ?, H], that the walk does not know to be some;
    vague: nothing is known."""
    if isinstance(value, Unknown) or (isinstance(value, Tensor) and value.shape is None):
        return "vague"
    if not isinstance(value, Tensor) or value.stream or value.shape is None or len(value.shape) != 3:
        return "clear"
    if like is None or like.shape is None:
        return "clear"
    return "lost" if (value.shape[0], value.shape[2]) == (Dim.atom("B"), like.shape[2]) else "clear"


def _same_class(frame: Frame, objects: tuple[Instance, ...]) -> bool:
    return isinstance(frame.self_, Instance) and any(frame.self_.cls is o.cls for o in objects)


def _squeeze(ctx: Context, file: SourceFile, node: ast.expr, value: Value, frame: Frame) -> None:
    if isinstance(node, ast.Tuple) and isinstance(value, Tup):
        for elt, item in zip(node.elts, value.items, strict=False):
            _squeeze(ctx, file, elt, item, frame)
        return
    if isinstance(node, ast.IfExp):
        _squeeze(ctx, file, node.body, value, frame)
        _squeeze(ctx, file, node.orelse, value, frame)
        return
    if isinstance(value, Tensor) and value.stream and value.rank == 3:
        wrap_expr(ctx.edit_set(file), node, "", ".squeeze(0)", "rows dropped again")
    elif isinstance(value, Tup) and any(isinstance(v, Tensor) and v.stream and v.rank == 3 for v in value.items):
        ctx.refuse(
            file,
            node,
            "KV204",
            "A tuple with hidden states is returned under one name.",
            "Return the tuple's elements by name.",
        )
