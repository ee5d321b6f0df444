"""What the model class owes latent attention: cache info with the MLA mark, and the split of the up projections."""

from __future__ import annotations

from kvskill.analyzer.modeling.run import LOADED
from kvskill.analyzer.modeling.values import Ref
from kvskill.implementer.framework.attention import init_expr
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.mla import METHOD, splits
from kvskill.implementer.framework.place import keyed_layers, place_of
from kvskill.implementer.render import render
from kvskill.implementer.textops import body_start, insert_after, insert_before

__all__ = ["add_mla_interface"]


def add_mla_interface(ctx: Context) -> None:
    """get_cache_info and process_weights_after_loading of the entry class, for models of latent attention only."""
    facts = ctx.facts
    run, entry = facts.prefill, facts.entry
    assert run is not None and entry is not None
    if any(a.mla is None for a in facts.attentions):
        ctx.refuse(
            entry.file,
            entry.node,
            "KV296",
            "The model has latent attention beside ordinary attention; `is_mla_backend` holds for a whole model.",
            "Convert it by hand.",
        )
        return
    place = place_of(ctx)
    forward = entry.method("forward")
    if place is None or forward is None:
        ctx.refuse(
            entry.file,
            entry.node,
            "KV230",
            "The attention objects are not reached by one path from the model class.",
            "Write get_cache_info by hand (`kvskill template show framework/mla_cache_info`).",
        )
        return
    layers, attention, sublayers = place
    func, owner = forward
    infer = next((f"self.{n}" for n, v in run.root.attrs.items() if v == Ref("infer")), None)
    if infer is None:
        ctx.refuse(owner.file, owner.node, "KV231", "The model class drops its configuration.", "Keep it.")
        return
    on_entry = ctx.manifest.target.block_size_on == "entry"
    missing = on_entry and any(init_expr(ctx, a.reps[0], "infer") is None for a in facts.attentions)
    item = "attention" if sublayers else f"layer{attention}"
    block_size = f"{infer}.scheduler_config.block_size"
    caches = f"list({item}.cache_entries)"
    if missing:
        caches = f"[replace(entry, block_size=block_size) for entry in {item}.cache_entries]"
        ctx.imports.setdefault(owner.file.shown, set()).add("replace")
    keyed = keyed_layers(ctx, place)
    if keyed is None:
        return
    text = render(
        "framework/mla_cache_info",
        me="self",
        layers="layers" if keyed else layers,
        keyed=layers if keyed else None,
        sublayers=sublayers,
        caches=caches,
        block_size=block_size,
        model_block_size=not on_entry,
        entry_block_size=missing,
        mla_backend="is_mla_backend" in ctx.manifest.target.model_cache_info_fields,
    )
    ctx.imports.setdefault(owner.file.shown, set()).update({"LayerCacheInfo", "ModelCacheInfo"})
    loop = f"for layer in {layers}:\n"
    if keyed:
        loop = f'layers = {layers}\nfor layer in layers.values() if hasattr(layers, "values") else layers:\n'
    if sublayers:
        loop += f"    for attention in layer{sublayers}:\n        attention.{METHOD}()\n"
    else:
        loop += f"    layer{attention}.{METHOD}()\n"
    unit = ctx.unit(func, owner.file)
    hook = entry.method(LOADED)
    if not any(splits(a.mla) for a in facts.attentions if a.mla is not None):
        pass  # the class's own halves are filled by its own code
    elif hook is None:
        body = "".join(f"    {line}\n" for line in loop.splitlines())
        doc = '    """Called once the weights are loaded: latent attention splits its up projections."""\n'
        text += f"\ndef {LOADED}(self):\n{doc}{body}"
    elif hook[1].file is entry.file:
        first = body_start(hook[0])
        insert_before(ctx.edit_set(hook[1].file), first, loop, "absorbed weights", ctx.unit(hook[0], hook[1].file))
    else:
        ctx.refuse(hook[1].file, hook[0], "KV297", f"`{LOADED}` is inherited from another file.", "Override it.")
        return
    insert_after(ctx.edit_set(owner.file), func, "\n" + text, "report the caches", unit)
