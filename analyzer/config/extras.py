"""What stands beside the K/V: prediction layers, experts, sinks, softcaps, ALiBi, indexers, states, quantisation."""

from __future__ import annotations

from typing import Any

from kvskill.analyzer.config.facts import Evidence, ExtraCache, LayerFacts, MoeFacts, MtpFacts, QuantFacts, Value
from kvskill.analyzer.config.nested import Located
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules
from kvskill.analyzer.config.sidefiles import SideFile

__all__ = ["alibi_of", "extra_caches", "moe_of", "mtp_of", "quant_of", "sinks_of", "softcap_of"]


def mtp_of(settings: Settings, located: Located, config: Any) -> MtpFacts:
    """Extra prediction layers; a key at the top of a nested file counts too."""
    others: dict[str, int] = {}
    for key in rules()["mtp_other_keys"]:
        found = settings.integer(settings.first_given([key]), low=0)
        if found:
            others[key] = found.value
    for key in rules()["mtp_keys"]:
        found = settings.integer(settings.first_given([key]), low=0, high=1024)
        if found is None and settings.path and isinstance(config.get(key), int):
            found = settings.integer(Value(config[key], Evidence("key", (key,))), low=0, high=1024)
        if found is not None:
            return MtpFacts(found.value, key, others)
    for key in rules()["mtp_keys"]:
        default = settings.info.defaults.get(key)
        if isinstance(default, int) and default:
            return MtpFacts(default, key, others)
    return MtpFacts(0, None, others)


def moe_of(settings: Settings) -> MoeFacts:
    """Mixture of experts, by the first key with more than one expert; a layer list without any decides against."""
    pattern, words = settings.value("hybrid_override_pattern"), settings.value("layers_block_type", "layer_types")
    if isinstance(pattern, str) and "E" not in pattern:
        return MoeFacts(False)
    if isinstance(words, list) and settings.info.facts.get("layers_from_pattern") and "moe" not in words:
        return MoeFacts(False)
    for given in (True, False):
        for key in rules()["expert_keys"]:
            found = settings.first_given([key]) if given else settings.get(key)
            if found is None or found.value is None:
                continue
            value = found.value[0] if isinstance(found.value, list) and found.value else found.value
            number = settings.integer(Value(value, found.evidence), low=0)
            if number and number.value > 1:
                return MoeFacts(True, number.value, key)
    return MoeFacts(False)


def softcap_of(settings: Settings, keys: list[str]) -> Value[float | None]:
    """A tanh cap, None when off (null or 0)."""
    for key in keys:
        found = settings.number(settings.get(key))
        if found and found.value:
            return Value(found.value, found.evidence)
    return Value(None, Evidence("absent"))


def alibi_of(settings: Settings) -> Value[bool]:
    """Linear position bias, by key, by position word, or by the class."""
    for key in rules()["alibi_keys"]:
        found = settings.get(key)
        if found is not None and isinstance(found.value, bool):
            return Value(found.value, found.evidence)
    for key in ("position_embedding_type", "position_embedding", "pos_emb_type"):
        value = settings.value(key)
        if isinstance(value, str) and value.lower() in rules()["alibi_position_types"]:
            return Value(True, Evidence("key", (settings.where(key),)))
    fact = settings.info.facts.get("alibi")
    if fact == "always":
        return Value(True, Evidence("class-fact", (), "the class always adds ALiBi"))
    if isinstance(fact, dict):
        if all(settings.value(k) == v for k, v in fact.items()):
            keys = tuple(settings.where(k) for k in fact)
            return Value(True, Evidence("class-fact", keys, f"the class adds ALiBi when {fact}"))
    return Value(False, Evidence("absent"))


def sinks_of(settings: Settings, slots: tuple[LayerFacts, ...]) -> Value[str]:
    """Learnable sink logits: by the file's switches, else by the class."""
    sliding = settings.flag("add_swa_attention_sink_bias")
    full = settings.flag("add_full_attention_sink_bias")
    which = settings.info.facts.get("sinks")
    evidence = Evidence("class-fact", (), "the class has a sink parameter")
    if sliding is not None or full is not None:
        which = "all" if sliding and full else "sliding" if sliding else "full" if full else None
        keys = ("add_swa_attention_sink_bias", "add_full_attention_sink_bias")
        evidence = Evidence("key", tuple(settings.where(k) for k in keys if settings.has(k)))
    if not which or not any(s.grows for s in slots):
        return Value("no", Evidence("absent"))
    words = {"all": "every layer", "sliding": "sliding layers", "full": "full layers"}
    return Value(f"{words[which]} (learnable per-head logit)", evidence)


def extra_caches(
    settings: Settings, slots: tuple[LayerFacts, ...], kinds: list[str], cross: bool
) -> tuple[ExtraCache, ...]:
    """Caches beside K/V."""
    out: list[ExtraCache] = []
    if indexed := _indexer(settings, kinds):
        out.append(indexed)
    compressed = sum(k == "compressed" for k in kinds)
    if compressed:
        keys = tuple(settings.where(k) for k in ("compress_ratios", "compress_rates") if settings.has(k))
        note = "one entry per group of tokens, pooled from them; beside the window cache of the same layers"
        out.append(ExtraCache("compressed K/V", compressed, Evidence("key" if keys else "class-fact", keys), note=note))
    beside = sum(s.has_state for s in slots)
    if beside:
        note = "fixed size per request, in the same layers as attention"
        out.append(ExtraCache("recurrent state beside attention", beside, Evidence("class-fact"), note=note))
    if cross:
        grows = sum(s.grows for s in slots)
        out.append(ExtraCache("cross-attention K/V", grows, Evidence("key"), note="fixed length per request"))
    return tuple(out)


def _indexer(settings: Settings, kinds: list[str]) -> ExtraCache | None:
    rule = rules()["indexer"]
    found = settings.integer(settings.get(*rule["head_dim"]))
    marked = [i for i, k in enumerate(kinds) if k in ("indexed", "block_indexed", "compressed")]
    if found is None or (not marked and found.evidence.source != "key"):
        return None
    where = marked or [i for i, k in enumerate(kinds) if k not in ("state", "none", "cross")]
    if "compressed" in kinds:
        ratios = settings.value("compress_ratios")
        if isinstance(ratios, list):
            where = [i for i, r in enumerate(ratios[: len(kinds)]) if r == 4] or where
        words = settings.value("layer_types")
        if isinstance(words, list):
            where = [i for i, w in enumerate(words[: len(kinds)]) if w == "compressed_sparse_attention"]
    types = settings.value(rule["types"])
    if isinstance(types, list) and len(types) == len(kinds):
        where = [i for i in where if types[i] != "shared"]
    heads = settings.integer(settings.get(rule["kv_heads"][0]))
    width = found.value * (heads.value if heads else 1)
    return ExtraCache(
        "indexer key cache (sparse top-k selection)",
        len(where),
        found.evidence,
        head_dim=width,
        note="a second paged cache beside the K/V",
    )


def quant_of(config: Any, settings: Settings, side: tuple[SideFile, ...]) -> QuantFacts:
    """Weight quantisation, and K/V stored in another type than the model's."""
    method, scheme, kv = None, None, None
    evidence = Evidence("absent")
    plain = rules()["kv_plain"]
    for tree, prefix in ((config, ""), (settings.tree, settings.path)):
        block = tree.get("quantization_config", tree.get("compression_config")) if hasattr(tree, "get") else None
        if not isinstance(block, dict):
            continue
        name = f"{prefix}.quantization_config" if prefix else "quantization_config"
        method = block.get("quant_method") or block.get("quant_algo") or block.get("model_quant_type")
        scheme = block.get("kv_cache_scheme")
        evidence = Evidence("key", (name,))
        for key in rules()["kv_quant_keys"]:
            value = _dig(block, key)
            if value not in plain and value != {} and value is not False:
                kv, evidence = f"{key}: {_short(value)}", Evidence("key", (f"{name}.{key}",))
                break
        break
    for key in ("kv_cache_dtype", "kv_quant_type", "kv_cache_quant_algo"):
        value = config.get(key)
        if kv is None and value not in plain:
            kv, evidence = f"{key}: {_short(value)}", Evidence("key", (key,))
    for item in side:
        method = method or item.method
        if kv is None and item.kv is not None:
            kv, evidence = f"{item.kv_key}: {_short(item.kv)}", Evidence("key", (f"{item.name}:{item.kv_key}",))
        elif item.method and not evidence.keys:
            evidence = Evidence("key", (item.name,))
    return QuantFacts(method if isinstance(method, str) else None, scheme, kv, evidence)


def _dig(block: Any, key: str) -> Any:
    for part in key.split("."):
        block = block.get(part) if isinstance(block, dict) else None
    return block


def _short(value: Any) -> str:
    if isinstance(value, dict):
        kind, bits = value.get("type") or value.get("dtype"), value.get("num_bits")
        return f"{kind}{bits}" if kind and bits else ", ".join(sorted(map(str, value)))[:60]
    return str(value)[:60]
