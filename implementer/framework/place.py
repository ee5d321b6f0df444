"""Where the attention objects are, below the model and below the model that drafts for it."""

from __future__ import annotations

import re

from kvskill.analyzer.modeling.run import LOADED, submodules
from kvskill.analyzer.modeling.values import Instance, ModuleSeq, Tensor, Value
from kvskill.implementer.framework.context import Context

__all__ = ["Place", "keyed_layers", "place_of"]

Place = tuple[str, str, str]


def place_of(ctx: Context) -> Place | None:
    """(`self.model.layers`, `.self_attn`, ``) or, with several attention objects per layer, (.., ``, `.self_attn`)."""
    run = ctx.facts.prefill
    assert run is not None
    found = _places(ctx, run.root)
    return next(iter(found)) if found is not None and len(found) == 1 else None


def keyed_layers(ctx: Context, place: Place) -> bool | None:
    """Are the drafting model's layers in a dict? None with a refusal where it does not get the model's methods, or
    keeps its attention objects elsewhere."""
    run, entry = ctx.facts.prefill, ctx.facts.entry
    assert run is not None and entry is not None
    if run.draft is None:
        return False
    cls = run.draft.cls
    names = ["get_cache_info", *([LOADED] if any(a.mla is not None for a in ctx.facts.attentions) else [])]
    own = any(cls.method(n) != entry.method(n) for n in names)
    if entry not in cls.mro() or own or _places(ctx, run.draft) != {place}:
        ctx.refuse(
            cls.file,
            cls.node,
            "KV223",
            f"The drafting model {cls.name} does not get its cache entries from {entry.name}.",
            "Derive it from the model's class and keep its layers under the same name, or convert both by hand.",
        )
        return None
    value: Value | None = run.draft
    for part in place[0].split(".")[1:]:
        value = value.attrs.get(part) if isinstance(value, Instance) else None
    return isinstance(value, ModuleSeq) and value.keys is not None


def _places(ctx: Context, root: Instance) -> set[Place] | None:
    wanted = {a.cls for a in ctx.facts.attentions}
    found: set[Place] = set()
    for module in submodules(root):
        if module.cls not in wanted or not _owns_cache(module):
            continue
        match = re.fullmatch(
            r"(?P<head>[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*)\.\d+(?P<tail>(?:\.[A-Za-z_]\w*)*)(?P<sub>\.\d+)?", module.path
        )
        if match is None:
            return None
        tail = match["tail"]
        found.add((f"self.{match['head']}", "" if match["sub"] else tail, tail if match["sub"] else ""))
    return found


def _owns_cache(module: Instance) -> bool:
    return any(isinstance(v, Tensor) and v.op == "cache" for v in module.attrs.values())
