"""The plan of a standalone conversion: mode one (contiguous pairs) to mode two (paged by hand)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Literal

from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.runner.files import Function, functions, leaf
from kvskill.analyzer.runner.topology import gathers
from kvskill.analyzer.runner.walkrun import CACHES
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.implementer.framework.calls import write_additions
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.deadcode import settle_names, sweep, write_removals
from kvskill.implementer.plan import Plan
from kvskill.implementer.standalone.allocation import convert_allocation, find_allocations
from kvskill.implementer.standalone.attention import convert_attention
from kvskill.implementer.standalone.cacheuse import refuse_cache_uses
from kvskill.implementer.standalone.graph import mark_step
from kvskill.implementer.standalone.helpers import helper_names, insert_helpers
from kvskill.implementer.standalone.latent import convert_latent
from kvskill.implementer.standalone.loop import convert_loop, find_loops, rewritten_caches
from kvskill.implementer.standalone.pick import add_pick, convert_pick
from kvskill.implementer.standalone.prepare import convert_prepare, find_prepare
from kvskill.implementer.textops import names_read, statements
from kvskill.manifest import Manifest

__all__ = ["build_standalone_plan"]


def build_standalone_plan(facts: ModelFacts, manifest: Manifest, config: Mapping[str, Any]) -> Plan:
    """Edits of modeling file and runner; with a blocking finding nothing may be written."""
    ctx = Context(facts, manifest)
    blocking = [f for f in facts.findings if f.severity is Severity.BLOCKING]
    if blocking or not facts.attentions:
        return Plan({}, tuple(blocking) or (_nothing(facts),))
    for group in manifest.groups:
        wanted = "NTD_TND" if group.attention == "MLA" else "TND"
        if group.prefill is not None and group.prefill.layout != wanted:
            return Plan({}, (_head_size(facts, group.prefill.layout),))
    for attention in facts.attentions:
        (convert_attention if attention.mla is None else convert_latent)(ctx, attention)
    picked = convert_pick(ctx)
    sweep(ctx, parameters=False)
    _convert_host(ctx, config, picked)
    _other_readers(ctx)
    settle_names(ctx)
    write_removals(ctx)
    write_additions(ctx)
    return Plan({k: v for k, v in ctx.edits.items() if v.edits}, tuple(dict.fromkeys(ctx.findings)))


def _convert_host(ctx: Context, config: Mapping[str, Any], picked: bool) -> None:
    """Allocation, and whoever prepares the model's inputs."""
    entry = ctx.facts.entry
    assert entry is not None
    files = list(ctx.facts.program.files.values())
    allocations = find_allocations(files)
    if len(allocations) != 1:
        node: ast.AST = allocations[1].loop if allocations else entry.node
        file = allocations[1].inside.file if allocations else entry.file
        count = f"{len(allocations)} places allocate" if allocations else "No loop allocates"
        ctx.refuse(
            file,
            node,
            "KV290",
            f"{count} one (k, v) pair for each layer; exactly one is expected.",
            "Allocate the caches in one loop over the layers that joins k and v in a tuple.",
        )
        return
    alloc = allocations[0]
    file = alloc.inside.file
    _, cache_class = helper_names(file)
    latent = _latent_sizes(ctx)
    if latent == "mixed":
        ctx.refuse(
            entry.file,
            entry.node,
            "KV296",
            "The model has latent attention beside ordinary attention, and one pair of caches for each layer.",
            "Convert it by hand.",
        )
        return
    assert not isinstance(latent, str)
    right_only = not _by_position(ctx)
    if not convert_allocation(ctx, alloc, config, cache_class, latent) or not insert_helpers(ctx, file, right_only):
        return
    me = alloc.inside.node.args.args[0].arg
    prepared = find_prepare(file, alloc.inside.owner)
    if prepared is not None:
        if not picked and not add_pick(ctx):
            _refuse_logits(ctx)
        own = prepared[0].node.args.args[0].arg
        convert_prepare(ctx, prepared[0], prepared[1], own, alloc.inside.node.name)
        _wrappers(ctx)
        mark_step(ctx)
        refuse_cache_uses(ctx, alloc.inside, alloc.calls, ())
        return
    gathered = gathers(ctx.facts.program.files.values())
    if gathered:
        ctx.refuse(
            gathered[0][0].file,
            gathered[0][1],
            "KV290",
            "The loop gathers lengths over ranks; the paged step describes the rows of one rank.",
            "Keep each rank's rows to itself, or convert it by hand.",
        )
        return
    forward = entry.method("forward")
    params = [a.arg for a in forward[0].args.args[1:]] if forward is not None else []
    loops, left = find_loops(file, alloc.inside.owner, params, alloc.inside.node.name)
    if len(loops) != 1 or left:
        if not loops and not left and _elsewhere(ctx, alloc.inside, params):
            return
        at: ast.AST = left[0] if left else (loops[1].prefill if len(loops) > 1 else alloc.inside.owner or file.tree)
        ctx.refuse(
            file,
            at,
            "KV290",
            "No single function with one prefill call and one decode call of the model was found.",
            "Call the model with is_prefill=True once and with is_prefill=False once, in one function.",
        )
        return
    convert_loop(ctx, loops[0], me, alloc.inside.node.name, picked)
    refuse_cache_uses(ctx, alloc.inside, alloc.calls, rewritten_caches(loops[0]))


def _elsewhere(ctx: Context, made: Function, params: list[str]) -> bool:
    """A refusal where the model is called in another class than that which allocates; False when it is not."""
    for file in ctx.facts.program.files.values():
        for owner in {f.owner for f in functions(file) if f.owner is not made.owner}:
            loops, left = find_loops(file, owner, params, made.node.name)
            calls = [loop.prefill for loop in loops] + left
            if calls:
                ctx.refuse(
                    file,
                    min(calls, key=lambda c: c.lineno),
                    "KV290",
                    f"The model is called here, and its caches are allocated elsewhere (`{made.node.name}`); the "
                    "step's state is kept beside them.",
                    "Allocate the caches in a method of the class that has the loop.",
                )
                return True
    return False


def _latent_sizes(ctx: Context) -> tuple[int, int] | Literal["mixed"] | None:
    """Sizes of the two tensors of a pair of caches of latent attention, in the order of the pair."""
    found: set[tuple[int, int] | None] = set()
    for a in ctx.facts.attentions:
        if a.mla is None:
            found.add(None)
            continue
        sizes = a.mla.values["rank"], a.mla.values["rope"]
        found.add(sizes if a.seam.k_cache == "k" else sizes[::-1])
    return found.pop() if len(found) == 1 else "mixed"


def _by_position(ctx: Context) -> bool:
    """Do all rotated queries of prefill depend on position_ids? Otherwise rotary counts columns (or there is none)."""
    run = ctx.facts.prefill
    assert run is not None
    for attention in ctx.facts.attentions:
        name = (attention.seam.q if attention.mla is None else attention.mla.q_rope).name
        for frame in run.walk.frames:
            before = frame.env_before.get(id(attention.seam.anchor)) if frame.func is attention.seam.func else None
            if before is not None and not any(
                t.op == "input:position_ids" for t in ancestors([before[name]])
            ):
                return False
    return True


def _refuse_logits(ctx: Context) -> None:
    entry = ctx.facts.entry
    assert entry is not None
    ctx.refuse(
        entry.file,
        entry.node,
        "KV290",
        "The model picks no prompt token before its head, and its inputs are prepared elsewhere than in the loop.",
        "Pick each row's last token in the model's forward.",
    )


def _wrappers(ctx: Context) -> None:
    """Methods of the entry that call its forward, or that get the dict of inputs, must pass unknown keywords on."""
    entry = ctx.facts.entry
    assert entry is not None
    starred = {
        n.func.attr
        for f in ctx.facts.program.files.values()
        for n in ast.walk(f.tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and any(k.arg is None for k in n.keywords)
    }
    for func in functions(entry.file):
        if func.owner is None or func.owner not in [c.node for c in entry.mro()] or func.node.name == "forward":
            continue
        calls = [n for n in ast.walk(func.node) if isinstance(n, ast.Call) and _is_forward(n, func.node)]
        closed = [c for c in calls if not any(k.arg is None for k in c.keywords)]
        if closed or (calls and func.node.name in starred and func.node.args.kwarg is None):
            ctx.refuse(
                entry.file,
                closed[0] if closed else func.node,
                "KV290",
                f"`{func.node.name}` calls forward without passing other keywords on.",
                "Take **kwargs and pass them on.",
            )


def _is_forward(node: ast.Call, func: ast.FunctionDef) -> bool:
    """`self.forward(..)` or `self(..)`"""
    me = func.args.args[0].arg if func.args.args else "self"
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "forward" and isinstance(node.func.value, ast.Name)
    return isinstance(node.func, ast.Name) and node.func.id == me


def _other_readers(ctx: Context) -> None:
    """Code that still reads a size of the caches: it now sees blocks. What comes of it must not be used."""
    for file in ctx.facts.program.files.values():
        for func in functions(file):
            for node in ast.walk(func.node):
                if not _cache_size(node):
                    continue
                task = "Take positions and lengths from the runner; drop this read."
                fact = "A size of the cache is read here; the cache is now [blocks, block_size, heads, dim]."
                if _unused(ctx, func.node, node):
                    ctx.optional(file, node, "KV292", fact, task)
                else:
                    ctx.refuse(file, node, "KV292", fact, task)


def _cache_size(node: ast.AST) -> bool:
    """`past_key_values[0][0].shape` and `.size()`"""
    if not (isinstance(node, ast.Attribute) and node.attr in ("size", "shape")):
        return False
    base: ast.expr = node.value
    while isinstance(base, ast.Subscript):
        base = base.value
    return base is not node.value and leaf(base) in CACHES


def _unused(ctx: Context, func: ast.FunctionDef, node: ast.AST) -> bool:
    """Is the value only given a name that no statement of either phase reads?"""
    stmt = next(s for s in reversed(list(statements(func.body))) if any(n is node for n in ast.walk(s)))
    names = {n.id for t in getattr(stmt, "targets", []) for n in ast.walk(t) if isinstance(n, ast.Name)}
    frames = ctx.frames_of(func)
    if not isinstance(stmt, ast.Assign) or not names or not frames:
        return False
    ran = [s for s in statements(func.body) if any(id(s) in f.env_before for f in frames) and s is not stmt]
    return not any(names & names_read(_own_part(s)) for s in ran)


def _own_part(stmt: ast.stmt) -> list[ast.AST]:
    """What a statement reads itself, without the statements in it."""
    if isinstance(stmt, (ast.If, ast.While)):
        return [stmt.test]
    if isinstance(stmt, ast.For):
        return [stmt.iter]
    return [*stmt.items] if isinstance(stmt, ast.With) else [stmt]


def _nothing(facts: ModelFacts) -> Diagnostic:
    span = facts.entry.file.span(facts.entry.node) if facts.entry is not None else Span("models")
    return Diagnostic(
        "KV291",
        Severity.BLOCKING,
        "No attention class with a handed cache was understood.",
        "Convert it by hand.",
        span,
    )


def _head_size(facts: ModelFacts, layout: str) -> Diagnostic:
    a = facts.attentions[0]
    return Diagnostic(
        "KV292",
        Severity.BLOCKING,
        f"The head size needs layout {layout}, which the standalone templates do not have.",
        "Convert by hand, or move the model to the framework.",
        a.file.span(a.cls.node),
    )
