"""Head counts and head widths, for the whole model and for kinds of layers that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvskill.analyzer.config.facts import Evidence, MlaFacts, Value
from kvskill.analyzer.config.problems import refused
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules

__all__ = ["Geometry", "base_geometry", "mla_of", "of_kind"]


@dataclass(frozen=True)
class Geometry:
    """Heads and widths of one layer; `assumed` names a value that only a convention gives."""

    q_heads: Value[int]
    kv_heads: Value[int]
    head_dim: Value[int]
    v_head_dim: int
    naive: int | None  # hidden // heads, when that is a whole number or not
    mla: MlaFacts | None = None
    assumed: tuple[str, ...] = ()


def mla_of(settings: Settings, override: Mapping[str, int] | None = None) -> MlaFacts | None:
    """Latent attention, when a latent rank is set and the file does not switch it off.

    Raises Refusal KV056 when the rank is there and a width is missing.
    """
    rank = settings.integer(settings.get("kv_lora_rank"), low=0)
    if rank is None or rank.value == 0 or settings.flag("use_mla") is False:
        return None
    widths: dict[str, int] = {}
    keys = [*rank.evidence.keys]
    for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        found = settings.integer(settings.get(key), low=0)
        if found is None and key == "v_head_dim" and "qk_nope_head_dim" in widths:
            found = Value(widths["qk_nope_head_dim"], Evidence("derived"))
        if found is None:
            raise refused(
                "KV056",
                settings.shown,
                f"kv_lora_rank is {rank.value}, but {settings.where(key)} is missing.",
                "Add the model's own width.",
            )
        widths[key] = found.value
        keys += found.evidence.keys
    query = settings.integer(settings.get("q_lora_rank"), low=0)
    merged = {**widths, "kv_lora_rank": rank.value, **(override or {})}
    return MlaFacts(
        merged["kv_lora_rank"],
        merged["qk_rope_head_dim"],
        merged["qk_nope_head_dim"],
        merged["v_head_dim"],
        query.value if query and query.value else None,
        Evidence(rank.evidence.source, tuple(keys), "kv_lora_rank is set: K/V are cached as one latent vector"),
    )


def base_geometry(settings: Settings) -> Geometry | None:
    """The model-wide heads, or None when no key gives any.

    Raises Refusal KV056 (a width that nobody gives) and KV058 (counts that do not divide).
    """
    q_heads = None
    if not isinstance(_list_of(settings, "q_heads"), list):
        q_heads = settings.integer(settings.find("q_heads"))
    if q_heads is None and (settings.info.facts.get("heads", {}).get("q_heads")):
        q_heads = Value(1, Evidence("absent"))
    if q_heads is None:
        listed = _list_of(settings, "q_heads")
        if not isinstance(listed, list) or not listed:
            return None
        numbers = settings.counts(settings.find("q_heads"))
        q_heads = Value(max(numbers), Evidence("key", _keys(settings.find("q_heads")), "largest"))
    if factors := settings.info.facts.get("heads", {}).get("q_heads"):
        found = [settings.integer(settings.get(k)) for k in factors]
        if all(found):
            product = math.prod(f.value for f in found if f)
            q_heads = Value(product, Evidence("class-fact", tuple(factors), "their product"))
    hidden = settings.integer(settings.find("hidden"))
    assumed: list[str] = []
    kv_heads = _kv_heads(settings, q_heads, assumed)
    mla = mla_of(settings)
    naive = hidden.value // q_heads.value if hidden else None
    if mla:
        head_dim: Value[int] = Value(mla.qk_head_dim, mla.evidence)
        return Geometry(q_heads, kv_heads, head_dim, mla.v_head_dim, naive, mla, tuple(assumed))
    if q_heads.value % kv_heads.value:
        raise refused(
            "KV058",
            settings.shown,
            f"{q_heads.value} query heads ({_key(q_heads)}) are not a multiple of "
            f"{kv_heads.value} K/V heads ({_key(kv_heads)}).",
            "Correct the head counts.",
        )
    head_dim = _head_dim(settings, hidden, q_heads)
    v_dim = _v_head_dim(settings, head_dim)
    return Geometry(q_heads, kv_heads, head_dim, v_dim, naive, None, tuple(assumed))


def _key(found: Value[Any]) -> str:
    return found.evidence.keys[0] if found.evidence.keys else "derived"


def _keys(found: Value[Any] | None) -> tuple[str, ...]:
    return found.evidence.keys if found else ()


def _list_of(settings: Settings, concept: str) -> Any:
    found = settings.find(concept)
    return found.value if found is not None else None


def _kv_heads(settings: Settings, q_heads: Value[int], assumed: list[str]) -> Value[int]:
    """K/V heads by the keys that decide, in the order the classes use them."""
    same = Value(q_heads.value, Evidence("derived", q_heads.evidence.keys, "no K/V head key: equals the query heads"))
    if fixed := settings.info.facts.get("kv_heads"):
        return Value(int(fixed), Evidence("class-fact", (), "the class has no other number of K/V heads"))
    if (grouped := settings.flag("multi_query_attention")) is not None:
        groups = settings.integer(settings.get("multi_query_group_num"))
        if grouped and groups is not None:
            return groups
        if grouped:
            return Value(1, Evidence("key", (settings.where("multi_query_attention"),), "one K/V head"))
    word = settings.value("attn_config.attn_type")
    if isinstance(word, str) and word in rules()["attn_type_heads"]:
        return Value(
            rules()["attn_type_heads"][word], Evidence("key", (settings.where("attn_config.attn_type"),), word)
        )
    listed = _list_of(settings, "kv_heads")
    if isinstance(listed, list) and listed:
        numbers = settings.counts(settings.find("kv_heads"))
        return Value(max(numbers), Evidence("key", _keys(settings.find("kv_heads")), "largest"))
    found = settings.integer(settings.find("kv_heads"))
    multi = settings.flag("multi_query")
    new_style = settings.flag("new_decoder_architecture") or settings.info.facts.get("new_decoder")
    if multi and not new_style:
        source = settings.get("multi_query")
        if found is None or found.value in (1, q_heads.value) or settings.info.reads("new_decoder_architecture"):
            keys = source.evidence.keys if source else ()
            return Value(1, Evidence(source.evidence.source if source else "key", keys, "multi_query: one K/V head"))
        raise refused(
            "KV055",
            settings.shown,
            f"multi_query is true, but {_key(found)} is {found.value}.",
            "Remove the one that the model does not use.",
        )
    if found is not None:
        if found.value > q_heads.value:
            raise refused(
                "KV058",
                settings.shown,
                f"{_key(found)} is {found.value}, more than the {q_heads.value} query heads ({_key(q_heads)}).",
                "Correct the head counts.",
            )
        return found
    group = settings.integer(settings.first_given(rules()["group_size_keys"]))
    if group and q_heads.value % group.value == 0:
        return Value(
            q_heads.value // group.value, Evidence("derived", group.evidence.keys, "query heads // group size")
        )
    if default := settings.info.facts.get("kv_heads_default"):
        return Value(int(default), Evidence("class-fact", (), "the class has no key for it"))
    if not settings.info.known and settings.find("kv_heads") is None and multi is None:
        assumed.append("num_key_value_heads")
    return same


def _head_dim(settings: Settings, hidden: Value[int] | None, q_heads: Value[int]) -> Value[int]:
    if settings.info.facts.get("heads", {}).get("head_dim") == "double" and hidden and hidden.value >= q_heads.value:
        how = "the class uses 2 * hidden_size // heads"
        return Value(2 * hidden.value // q_heads.value, Evidence("class-fact", hidden.evidence.keys, how))
    found = settings.integer(settings.find("head_dim"))
    if found is not None:
        return found
    if hidden is None:
        raise refused(
            "KV056", settings.shown, "Neither a head width nor a hidden size is given.", "Add the model's own values."
        )
    if hidden.value % q_heads.value:
        raise refused(
            "KV058",
            settings.shown,
            f"{_key(hidden)} {hidden.value} is not a multiple of {q_heads.value} heads, and no head_dim is given.",
            "Add the model's own head_dim.",
        )
    if hidden.value < q_heads.value:
        raise refused(
            "KV058",
            settings.shown,
            f"{_key(hidden)} {hidden.value} is smaller than the {q_heads.value} heads.",
            "Correct the sizes.",
        )
    keys = (*hidden.evidence.keys, *q_heads.evidence.keys)
    return Value(hidden.value // q_heads.value, Evidence("derived", keys, "hidden size // heads"))


def _v_head_dim(settings: Settings, head_dim: Value[int]) -> int:
    if settings.info.facts.get("v_is_k"):
        return 0
    found = settings.integer(settings.find("v_head_dim"), low=0)
    return found.value if found and found.value else head_dim.value


def of_kind(base: Geometry, kind: str, settings: Settings) -> Geometry:
    """The geometry of layers of one kind, where the file or the class gives them other heads."""
    sliding = kind in ("sliding", "hybrid_sliding")
    out = base
    if not sliding and (wide := settings.integer(settings.get("global_head_dim"))):
        out = replace(out, head_dim=wide, v_head_dim=wide.value)
        fewer = settings.integer(settings.get("num_global_key_value_heads"))
        if fewer and settings.value("attention_k_eq_v"):
            out = replace(out, kv_heads=fewer)
    by_type = settings.info.facts.get("by_type", {}).get("sliding" if sliding else "full", {})
    if sliding and not by_type:
        by_type = rules()["sliding_geometry"]
    picked: dict[str, Value[int]] = {}
    for name, sources in by_type.items():
        value = _first(settings, sources, base)
        if value is not None:
            picked[name] = value
    if not picked:
        return out
    if base.mla:
        widths = {k: v.value for k, v in picked.items() if k not in ("q_heads", "kv_heads")}
        mla = mla_of(settings, widths)
        assert mla is not None
        out = replace(out, mla=mla, head_dim=Value(mla.qk_head_dim, mla.evidence), v_head_dim=mla.v_head_dim)
    elif "head_dim" in picked:
        out = replace(out, head_dim=picked["head_dim"], v_head_dim=picked["head_dim"].value)
        if base.v_head_dim != base.head_dim.value:
            out = replace(out, v_head_dim=base.v_head_dim)
    if "v_head_dim" in picked and not base.mla:
        out = replace(out, v_head_dim=picked["v_head_dim"].value)
    out = replace(out, q_heads=picked.get("q_heads", out.q_heads), kv_heads=picked.get("kv_heads", out.kv_heads))
    if out.kv_heads is base.kv_heads and base.kv_heads.value == base.q_heads.value and base.mla:
        out = replace(out, kv_heads=out.q_heads)
    return out


def _first(settings: Settings, sources: list[Any], base: Geometry) -> Value[int] | None:
    for source in sources:
        if isinstance(source, int):
            return Value(source, Evidence("class-fact"))
        if source == "2x":
            twice = Evidence("class-fact", base.kv_heads.evidence.keys, "twice the K/V heads")
            return Value(2 * base.kv_heads.value, twice)
        found = settings.integer(settings.get(source))
        if found is not None:
            return found
    return None
