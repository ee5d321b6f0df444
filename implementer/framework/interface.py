"""What the framework asks of the model class: get_cache_info, registered groups, imports."""

from __future__ import annotations

import ast
import re

from kvskill.analyzer.modeling.run import submodules
from kvskill.analyzer.modeling.values import Instance, Ref, Tensor
from kvskill.implementer.framework.attention import init_expr
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.place import keyed_layers
from kvskill.implementer.render import render
from kvskill.implementer.textops import body_start, drop_method, indent_of, insert_after, insert_before
from kvskill.source import SourceFile

__all__ = ["add_cache_info", "add_imports", "drop_init_cache", "register_groups"]

_CACHE_MODULE = "executor.core.kv_cache.cache_info"


def add_cache_info(ctx: Context) -> None:
    """Give the entry class get_cache_info."""
    facts = ctx.facts
    run, entry = facts.prefill, facts.entry
    assert run is not None and entry is not None
    forward = entry.method("forward")
    if forward is None:
        return
    func, owner = forward
    place = _layers(ctx)
    if place is None:
        ctx.refuse(
            owner.file,
            owner.node,
            "KV230",
            "The attention objects are not reached by one path from the model class.",
            "Write get_cache_info by hand (`kvskill template show framework/get_cache_info`).",
        )
        return
    layers, attention = place
    keyed = keyed_layers(ctx, (layers, attention, ""))
    if keyed is None:
        return
    infer = next((f"self.{n}" for n, v in run.root.attrs.items() if v == Ref("infer")), None)
    edits = ctx.edit_set(owner.file)
    if infer is None:
        given = init_expr(ctx, run.root, "infer")
        init = entry.method("__init__")
        if given is None or init is None:
            ctx.refuse(owner.file, owner.node, "KV231", "The model class drops its configuration.", "Keep it.")
            return
        first = body_start(init[0])
        insert_after(
            edits,
            _super_call(init[0]) or first,
            f"self.infer_config = {given}\n",
            "block size",
            ctx.unit(init[0], owner.file),
        )
        infer = "self.infer_config"
    entry_era = ctx.manifest.target.block_size_on == "entry"
    missing = entry_era and any(init_expr(ctx, a.reps[0], "infer") is None for a in facts.attentions)
    text = render(
        "framework/get_cache_info",
        me="self",
        layers="layers" if keyed else layers,
        keyed=layers if keyed else None,
        attention=attention,
        block_size=f"{infer}.scheduler_config.block_size",
        entry_block_size=missing,
        model_block_size=not entry_era,
    )
    if missing:
        ctx.imports.setdefault(owner.file.shown, set()).add("replace")
    unit = ctx.unit(func, owner.file)
    insert_after(edits, func, "\n" + text, "report the caches", unit)
    ctx.imports.setdefault(owner.file.shown, set()).update({"LayerCacheInfo", "ModelCacheInfo"})


def _layers(ctx: Context) -> tuple[str, str] | None:
    """(`self.model.layers`, `.self_attn`): where the layers are and how one reaches its attention."""
    run = ctx.facts.prefill
    assert run is not None
    wanted = {a.cls for a in ctx.facts.attentions}
    paths = [m.path for m in submodules(run.root) if wanted & set(m.cls.mro()) and _owns_cache(m)]
    found: set[tuple[str, str]] = set()
    for path in paths:
        match = re.fullmatch(r"(?P<head>[\w.]+?)\.(?P<index>\d+)(?P<tail>(\.[A-Za-z_]\w*)*)", path)
        if match is None:
            return None
        found.add((f"self.{match['head']}", match["tail"]))
    if len(found) != 1:
        return None
    return next(iter(found))


def _owns_cache(module: Instance) -> bool:
    return any(isinstance(v, Tensor) and v.op == "cache" for v in module.attrs.values())


def _super_call(init: ast.FunctionDef) -> ast.stmt | None:
    for stmt in init.body:
        if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
            func = stmt.value.func
            if isinstance(func, ast.Attribute) and func.attr == "__init__":
                return stmt
    return None


def drop_init_cache(ctx: Context) -> None:
    """The paged engine never calls the model's own `init_cache`: it goes, unless it sets anything but these caches."""
    entry = ctx.facts.entry
    found = entry.method("init_cache") if entry is not None else None
    if found is None:
        return
    func, owner = found
    caches = {n for a in ctx.facts.attentions for n in (a.seam.k_cache, a.seam.v_cache)}
    caches |= {attr for a in ctx.facts.attentions for _, attr in a.caches.holders}
    for node in ast.walk(func):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in caches:
            ctx.refuse(
                owner.file,
                node,
                "KV275",
                f"`init_cache` also sets `{node.attr}`; the paged engine will not call it.",
                "Set it in __init__ or in forward first.",
            )
            return
    if not drop_method(ctx.edit_set(owner.file), func, "the engine allocates the caches"):
        ctx.refuse(owner.file, func, "KV295", "`init_cache` shares a line with other code.", "Put it on its own lines.")


def register_groups(ctx: Context) -> None:
    """On targets where models register their groups, the paged engine asks for attn_tp_group."""
    facts = ctx.facts
    if not ctx.manifest.target.registers_groups or facts.entry is None or facts.prefill is None:
        return
    for cls in facts.program.classes():
        for node in ast.walk(cls.node):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "register_group"
                and any(isinstance(a, ast.Constant) and a.value == "attn_tp_group" for a in _values(node))
            ):
                return
    init = facts.entry.method("__init__")
    if init is None:
        return
    func, owner = init
    run = facts.prefill
    comm = init_expr(ctx, run.root, "comm")
    infer = init_expr(ctx, run.root, "infer")
    call = _super_call(func)
    if comm is None or infer is None or call is None:
        ctx.refuse(
            owner.file,
            func,
            "KV232",
            "The target wants models to register `attn_tp_group`, but this class has no comm_manager.",
            "Take `comm_manager` in __init__ and register the group before building submodules.",
        )
        return
    names = _wanted_groups(ctx)
    lines = ["# the paged engine sizes its blocks over this group"]
    for name in names:
        size = f"{infer}.parallel_config.{name.removesuffix('_group')}_size"
        lines += [
            f"{comm}.register_group(",
            f'    name="{name}",',
            f"    group_num={infer}.parallel_config.world_size // {size},",
            f"    group_size={size},",
            ")",
        ]
    text = "\n".join(lines) + "\n"
    if comm.startswith("self.") or infer.startswith("self."):
        anchor = max(
            (s for n in (comm, infer) if n.startswith("self.") and (s := run.root.attr_nodes.get(n[5:])) is not None),
            key=lambda s: s.lineno,
            default=call,
        )
    else:
        anchor = call
    insert_after(ctx.edit_set(owner.file), anchor, text, "register the attention group", ctx.unit(func, owner.file))


def _wanted_groups(ctx: Context) -> list[str]:
    """attn_tp_group, and every other tensor-parallel group that the code asks for by name."""
    names = {"attn_tp_group"}
    for file in ctx.facts.program.files.values():
        for node in ast.walk(file.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get_rank", "get_group")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
                and node.args[0].value.endswith("_tp_group")
            ):
                names.add(node.args[0].value)
    return sorted(names)


def _values(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *[k.value for k in node.keywords]]


def add_imports(ctx: Context) -> None:
    """Add the imports that the new code needs, beside the file's own imports."""
    for shown, wanted in sorted(ctx.imports.items()):
        file = ctx.facts.program.files[shown]
        bound = ctx.facts.program.modules[shown]
        lines: list[str] = []
        cache = sorted(n for n in wanted if n != "replace" and n not in bound)
        if "replace" in wanted and "replace" not in bound:
            lines.append("from dataclasses import replace")
        if cache:
            lines.append(f"from {_CACHE_MODULE} import {', '.join(cache)}")
        if lines:
            _insert_import(ctx, file, lines)


def _insert_import(ctx: Context, file: SourceFile, lines: list[str]) -> None:
    imports = [s for s in file.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
    own = [s for s in imports if isinstance(s, ast.ImportFrom) and (s.module or "").startswith("executor")]
    plain = [s for s in imports if not (isinstance(s, ast.ImportFrom) and s.level)]
    candidates = own or plain or imports
    edits = ctx.edit_set(file)
    text = "\n".join(lines) + "\n"
    if candidates:
        assert not indent_of(file, candidates[-1])
        insert_after(edits, candidates[-1], text, "imports")
    else:
        insert_before(edits, body_start_of_module(file), text, "imports")


def body_start_of_module(file: SourceFile) -> ast.stmt:
    """The first statement after the module docstring."""
    first = file.tree.body[0]
    doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return file.tree.body[1] if doc and len(file.tree.body) > 1 else first
