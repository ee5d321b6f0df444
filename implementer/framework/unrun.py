"""Methods that do not run under the configuration at hand, and that the conversion leaves behind.

Other modes (micro batches, a fused prologue, ...) call what was converted in its old form, or use the Legacy cache.
They are left as they are, but raise first, and are reported as optional tasks. Methods that nothing calls any more go.
"""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.run import LOADED, submodules
from kvskill.analyzer.modeling.values import ClassVal, Instance
from kvskill.implementer.framework.container import Containers
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import body_start, drop_method, insert_before, whole_removal

__all__ = ["drop_uncalled", "guard_unrun"]

_TEXT = 'raise NotImplementedError("this mode still runs over the Legacy cache; see KV221")\n'
# what the engine calls by name
_ENGINE = frozenset(
    {"forward", LOADED, "load_weights", "check_model_settings", "get_cache_info", "init_cache", "prefill", "decode"}
)


def guard_unrun(ctx: Context, containers: Containers) -> None:
    """Let methods of the model's own classes that no run enters raise, where they meet what was converted."""
    names = {n for a in ctx.facts.attentions if a.mla is not None for n in (*a.mla.caches, *a.mla.tables)}
    if not names:
        return
    run = {id(f.func) for r in (ctx.facts.prefill, ctx.facts.decode) if r is not None for f in r.walk.frames}
    entries = {id(a.entry) for a in ctx.facts.attentions}
    funcs = [f.node for f in containers.functions.values() if isinstance(f.node, ast.FunctionDef)]
    funcs += [cut[1] for cut in ctx.cuts.values() if isinstance(cut[1], ast.FunctionDef)]  # parameters went
    funcs += ctx.narrowed.values()
    changed = {f.name for f in funcs} - {"forward"}
    for cls in ctx.facts.program.classes():
        children = _converted_children(ctx, cls, entries | {id(f) for f in funcs})
        for item in cls.node.body:
            if not isinstance(item, ast.FunctionDef) or id(item) in run or item.name.startswith("__"):
                continue
            if item.name in _ENGINE - {"forward"}:
                continue
            what = _meets(item, names, changed, children)
            if what is None:
                continue
            ctx.unrun.add(id(item))
            edits = ctx.edit_set(cls.file)
            insert_before(edits, body_start(item), _TEXT, "a mode that was not converted", ctx.unit(item, cls.file))
            ctx.optional(
                cls.file,
                item,
                "KV221",
                f"{cls.name}.{item.name} is not run by these settings and was not converted ({what}); it raises now.",
                "Convert it like the path that runs, then remove the raise, if you use this mode.",
            )


def _converted_children(ctx: Context, cls: ClassVal, converted: set[int]) -> set[str]:
    """Attributes of the class's objects that hold objects whose forward was converted."""
    out: set[str] = set()
    run = ctx.facts.prefill
    assert run is not None
    for root in run.roots:
        for module in submodules(root):
            if cls not in module.cls.mro():
                continue
            for name, value in module.attrs.items():
                found = value.cls.method("forward") if isinstance(value, Instance) else None
                if found is not None and id(found[0]) in converted:
                    out.add(name)
    return out


def _meets(func: ast.FunctionDef, names: set[str], changed: set[str], children: set[str]) -> str | None:
    me = func.args.args[0].arg if func.args.args else "self"
    for node in ast.walk(func):
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name):
            if node.value.id == me:
                return f"it uses `{node.attr}`"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            mine = isinstance(node.func.value, ast.Name) and node.func.value.id == me
            if name in changed or (mine and name in children):
                return f"it calls `{name}`"
    return None


def drop_uncalled(ctx: Context) -> None:
    """Remove methods whose only calls went with the Legacy cache: all that the walk saw, all that the files name."""
    if not any(a.mla is not None and a.mla.tables for a in ctx.facts.attentions):
        return
    frames = [f for r in (ctx.facts.prefill, ctx.facts.decode) if r is not None for f in r.walk.frames]
    gone = _gone(ctx)
    for cls in ctx.facts.program.classes():
        for item in cls.node.body:
            if not isinstance(item, ast.FunctionDef) or item.name in _ENGINE or item.name.startswith("__"):
                continue
            mine = [f for f in frames if f.func is item]
            if not mine or any(id(f.call) not in gone for f in mine) or _named(ctx, item.name, gone):
                continue
            _forget(ctx, cls, item)
            if drop_method(ctx.edit_set(cls.file), item, "nothing calls it any more"):
                ctx.unrun.add(id(item))


def _forget(ctx: Context, cls: ClassVal, func: ast.FunctionDef) -> None:
    """What other passes planned inside the function."""
    nodes = {id(n) for n in ast.walk(func)}
    start, end = cls.file.byte_range(func)
    edits = ctx.edit_set(cls.file)
    edits.edits = [e for e in edits.edits if not (start <= e.start and e.end <= end)]
    ctx.cuts = {key: cut for key, cut in ctx.cuts.items() if id(cut[1]) not in nodes}
    ctx.added = [item for item in ctx.added if id(item[1]) not in nodes]
    ctx.functions.pop(id(func), None)


def _gone(ctx: Context) -> set[int]:
    out: set[int] = set()
    for func in ctx.functions.values():
        assert isinstance(func.node, ast.FunctionDef)
        for stmt in whole_removal(func.node.body, ctx.removed.get(id(func.node), set())):
            out.update(id(n) for n in ast.walk(stmt))
    for cls in ctx.facts.program.classes():
        for item in cls.node.body:
            if id(item) in ctx.unrun:
                out.update(id(n) for n in ast.walk(item))
    return out


def _named(ctx: Context, name: str, gone: set[int]) -> bool:
    return any(
        isinstance(n, ast.Attribute) and n.attr == name and id(n) not in gone
        for file in ctx.facts.program.files.values()
        for n in ast.walk(file.tree)
    )
