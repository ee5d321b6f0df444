"""One LayerFacts per attention slot: kinds, windows, geometry, overrides per layer, and who shares whose K/V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvskill.analyzer.config.facts import AttnType, LayerFacts, LayerKind, Value
from kvskill.analyzer.config.heads import Geometry, of_kind
from kvskill.analyzer.config.problems import refused
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules
from kvskill.analyzer.config.window import Window

__all__ = ["build_slots"]

_KIND: dict[str, LayerKind] = {
    "full": "full",
    "sliding": "sliding",
    "chunked": "chunked",
    "blocksparse": "blocksparse",
    "state": "state",
    "none": "none",
    "cross": "cross",
    "hybrid": "full",
    "hybrid_sliding": "sliding",
    "indexed": "full",
    "block_indexed": "blocksparse",
    "compressed": "sliding",
    "reference_sliding": "blocksparse",
    "window_grid": "blocksparse",
}
_ATTN_TYPE: dict[LayerKind, AttnType] = {"full": "FullAttention", "mla": "FullAttention", "sliding": "SlidingWindow"}


def build_slots(
    settings: Settings, window: Window, base: Geometry | None, span: int | None, nope: list[bool]
) -> tuple[LayerFacts, ...]:
    """Slots in order. `nope[i]` is True where the layer has no position encoding.

    Raises Refusal KV059 for a sharing rule that does not fit the layers.
    """
    out: list[LayerFacts] = []
    geometry: dict[str, Geometry] = {}
    for index, (word, size) in enumerate(zip(window.kinds, window.per_layer, strict=True)):
        kind = _KIND[word]
        if kind in ("state", "none", "cross") or base is None:
            out.append(LayerFacts(index, kind, rope=False))
            continue
        if word not in geometry:
            geometry[word] = of_kind(base, word, settings)
        shape = geometry[word]
        if shape.mla and kind == "full":
            kind = "mla"
        slot = LayerFacts(
            index,
            kind,
            _ATTN_TYPE.get(kind),
            window=size,
            span=span if kind in ("chunked", "blocksparse") else None,
            q_heads=shape.q_heads.value,
            kv_heads=1 if shape.mla else shape.kv_heads.value,
            k_head_dim=shape.head_dim.value,
            v_head_dim=shape.v_head_dim,
            cache_width=_latent_width(shape, settings, nope[index]),
            rope=not nope[index],
            has_state=word in ("hybrid", "hybrid_sliding"),
            k_eq_v=bool(settings.value("attention_k_eq_v")) and kind != "sliding",
        )
        out.append(_override(slot, settings))
    out = _share(out, window.kinds, settings)
    return tuple(replace(s, index=i) for i, s in enumerate(_repeated(out, settings)))


def _latent_width(shape: Geometry, settings: Settings, nope: bool) -> int | None:
    """Cached elements per token of latent attention; some classes cache no rope part in position-free layers."""
    if shape.mla is None:
        return None
    if nope and settings.info.facts.get("nope_drops_rope"):
        return shape.mla.kv_lora_rank
    return shape.mla.cache_width


def _repeated(slots: list[LayerFacts], settings: Settings) -> list[LayerFacts]:
    """Slots of layers that run more than once with a cache of their own each time, in cache order."""
    rule = settings.info.facts.get("slots")
    if isinstance(rule, int):  # so many attention blocks in each layer
        return [s for s in slots for _ in range(rule)]
    if isinstance(rule, Mapping) and "times" in rule and not settings.has(rule["unless"]):
        times = 1
        for key, more in rule["times"]:
            found = settings.integer(settings.get(key))
            times *= found.value + more if found else 1
        return slots * times
    if isinstance(rule, Mapping) and "repeat" in rule:
        start_key, end_key, passes_key = rule["repeat"]
        start = settings.integer(settings.get(start_key), low=0)
        end = settings.integer(settings.get(end_key.lstrip("-")), low=0)
        passes = settings.integer(settings.get(passes_key), high=64)
        if start and end and passes:
            last = len(slots) - end.value if end_key.startswith("-") else end.value
            return slots + slots[start.value : last] * (passes.value - 1)
    loops = settings.integer(settings.first_given(rules()["loop_keys"]), high=64)
    return slots * loops.value if loops else slots


def _override(slot: LayerFacts, settings: Settings) -> LayerFacts:
    """Values that lists per layer, block_configs or per_layer_config give to this layer alone."""
    changes: dict[str, Any] = {}
    for key, name in (
        ("num_attention_heads_per_layer", "q_heads"),
        ("num_key_value_heads_per_layer", "kv_heads"),
        ("num_query_heads", "q_heads"),
        ("num_kv_heads", "kv_heads"),
        ("num_key_value_heads", "kv_heads"),
        ("num_attention_heads", "q_heads"),
    ):
        value = settings.raw(key)
        if isinstance(value, list) and slot.index < len(value) and isinstance(value[slot.index], int):
            changes[name] = value[slot.index]
    changes.update(_block_config(slot, settings))
    changes.update(_per_layer(slot, settings))
    if changes.pop("gone", False):
        return LayerFacts(slot.index, "none", rope=False)
    if not changes:
        return slot
    if "k_head_dim" in changes and "v_head_dim" not in changes and slot.v_head_dim == slot.k_head_dim:
        changes["v_head_dim"] = changes["k_head_dim"]
    if "window" in changes and slot.kind in ("full", "sliding"):
        size = changes["window"]
        changes["kind"] = "sliding" if size else "full"
        changes["attn_type"] = _ATTN_TYPE[changes["kind"]]
    made = replace(slot, **changes)
    if made.q_heads and made.kv_heads and made.cache_width is None and made.q_heads % made.kv_heads:
        raise refused(
            "KV058",
            settings.shown,
            f"Layer {slot.index} has {made.q_heads} query heads and {made.kv_heads} K/V heads.",
            "Correct the head counts.",
        )
    return made


def _block_config(slot: LayerFacts, settings: Settings) -> dict[str, Any]:
    blocks = settings.raw("block_configs")
    if not isinstance(blocks, list) or slot.index >= len(blocks) or not isinstance(blocks[slot.index], Mapping):
        return {}
    attention = blocks[slot.index].get("attention")
    if not isinstance(attention, Mapping):
        return {}
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return {"gone": True}
    out: dict[str, Any] = {}
    group = attention.get("n_heads_in_group")
    if isinstance(group, int) and group > 0 and slot.q_heads:
        out["kv_heads"] = max(slot.q_heads // group, 1)
    kv_heads = attention.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads > 0:
        out["kv_heads"] = kv_heads
    size = attention.get("window_length") or attention.get("sliding_window")
    if isinstance(size, int) and size > 0:
        out["window"] = size
    return out


def _per_layer(slot: LayerFacts, settings: Settings) -> dict[str, Any]:
    table = settings.raw("per_layer_config")
    if not isinstance(table, Mapping):
        return {}
    entry = next(
        (v for k, v in table.items() if str(k).isdigit() and int(k) == slot.index and isinstance(v, Mapping)), None
    )
    if entry is None:
        return {}
    skip = entry.get("skip")
    if isinstance(skip, list) and "attention" in skip:
        return {"gone": True}
    out: dict[str, Any] = {}
    for key, name in (
        ("num_attention_heads", "q_heads"),
        ("num_key_value_heads", "kv_heads"),
        ("head_dim", "k_head_dim"),
        ("v_head_dim", "v_head_dim"),
    ):
        value = entry.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and slot.cache_width is None:
            out[name] = value
    if slot.cache_width is not None:
        out.update(_per_layer_mla(slot, entry, settings))
    if "sliding_window" in entry and (entry["sliding_window"] is None or isinstance(entry["sliding_window"], int)):
        out["window"] = entry["sliding_window"] or None
    return out


def _per_layer_mla(slot: LayerFacts, entry: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    def width(key: str) -> int:
        value = entry.get(key, settings.value(key))
        return value if isinstance(value, int) else 0

    out: dict[str, Any] = {}
    if isinstance(entry.get("num_attention_heads"), int):
        out["q_heads"] = entry["num_attention_heads"]
    if any(k in entry for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")):
        out["cache_width"] = width("kv_lora_rank") + width("qk_rope_head_dim")
        out["k_head_dim"] = width("qk_nope_head_dim") + width("qk_rope_head_dim")
        out["v_head_dim"] = width("v_head_dim")
    return out


def _share(slots: list[LayerFacts], kinds: list[str], settings: Settings) -> list[LayerFacts]:
    sources = _sharing(slots, kinds, settings)
    return [replace(s, shares_kv_with=sources[s.index]) if s.index in sources else s for s in slots]


def _sharing(slots: list[LayerFacts], kinds: list[str], settings: Settings) -> dict[int, int]:
    """Reader index -> owner index."""
    count = len(slots)
    if shared := settings.integer(settings.get("num_kv_shared_layers"), low=0):
        return _last_layers_share(shared, count, kinds, settings)
    found = settings.get("kv_source_layers")
    if found is not None and found.value is not None:
        table = settings.whole_list(found, "a list of layer indices")
        if len(table) != count or any(not 0 <= s <= i for i, s in enumerate(table)):
            raise refused("KV059", settings.shown, "kv_source_layers does not fit the layers.", "Correct the list.")
        return {i: s for i, s in enumerate(table) if s != i}
    step = settings.integer(settings.first_given(["cla_share_factor"]))
    if step and step.value > 1 and settings.flag("use_cla"):
        return {i: i - i % step.value for i in range(count) if i % step.value}
    return {}


def _last_layers_share(shared: Value[int], count: int, kinds: list[str], settings: Settings) -> dict[int, int]:
    first = count - shared.value
    if shared.value == 0:
        return {}
    out: dict[int, int] = {}
    for index in range(max(first, 0), count):
        owner = next((j for j in range(first - 1, -1, -1) if kinds[j] == kinds[index]), None)
        if owner is None:
            raise refused(
                "KV059",
                settings.shown,
                f"{shared.evidence.keys[0]} is {shared.value} of {count} layers: layer {index} has no owner to read.",
                "Correct the number.",
            )
        out[index] = owner
    return out
