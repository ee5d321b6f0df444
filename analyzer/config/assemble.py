"""Small conclusions that ConfigFacts shows: attention kind, groups, sharing, the values of the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from kvskill.analyzer.config.expand import layer_flags
from kvskill.analyzer.config.facts import Evidence, KvGroup, LayerFacts, MlaFacts, Value
from kvskill.analyzer.config.heads import Geometry
from kvskill.analyzer.config.reader import Settings

__all__ = [
    "architecture",
    "attention_kind",
    "groups_of",
    "k_eq_v_of",
    "model_heads",
    "nope_flags",
    "rule_text",
    "sharing_of",
    "sparse_span",
]


def architecture(config: Mapping[str, Any], settings: Settings) -> str | None:
    """The first architecture name, of the whole file or of the nested settings."""
    for tree in (config, settings.tree):
        names = tree.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    return None


def rule_text(slots: tuple[LayerFacts, ...], how: str, off: str, raw: Any) -> str:
    """How the kinds follow: the class's or the file's rule, or why a given window does nothing."""
    kinds = {s.kind for s in slots}
    if len(kinds) > 1:
        return how
    if off and raw is not None and kinds <= {"full", "mla"}:
        return f"{off}: every layer full"
    words = {
        "full": "every layer full attention",
        "mla": "every layer MLA (latent K/V)",
        "sliding": "every layer slides",
        "state": "every layer holds fixed-size state",
        "none": "no layer has a cache",
    }
    plain = words.get(next(iter(kinds), ""), how)
    return f"{plain} ({how})" if how and how != "no per-layer rule" and not how.startswith("every layer") else plain


def attention_kind(
    slots: tuple[LayerFacts, ...], base: Geometry | None, mla: MlaFacts | None
) -> Literal["MHA", "GQA", "MQA", "MLA", "none"]:
    """By the model-wide heads; "none" when no slot caches K/V."""
    if base is None or not any(s.grows for s in slots):
        return "none"
    if mla:
        return "MLA"
    q_heads, kv_heads = model_heads(slots, base)
    if kv_heads == q_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def model_heads(slots: tuple[LayerFacts, ...], base: Geometry) -> tuple[int, int]:
    """The model-wide heads, or the most frequent ones where no slot has them (heads given layer by layer)."""
    pairs = Counter((s.q_heads or 0, s.kv_heads or 0) for s in slots if s.grows)
    wide = (base.q_heads.value, base.kv_heads.value)
    return wide if wide in pairs or not pairs else pairs.most_common(1)[0][0]


def groups_of(slots: tuple[LayerFacts, ...]) -> tuple[KvGroup, ...]:
    """Slots with one geometry, in the order in which the geometries first appear."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], LayerFacts] = {}
    for s in slots:
        if not s.grows:
            continue
        shares = s.shares_kv_with is not None
        key = (s.kind, s.q_heads, s.kv_heads, s.k_head_dim, s.v_head_dim, s.window, s.span, s.cache_width, shares)
        rows.setdefault(key, []).append(s.index)
        first.setdefault(key, s)
    return tuple(
        KvGroup(
            layers=len(indices),
            indices=tuple(indices),
            kind=s.kind,
            attn_type=s.attn_type,
            q_heads=s.q_heads,
            kv_heads=s.kv_heads,
            k_head_dim=s.k_head_dim,
            v_head_dim=s.v_head_dim,
            window=s.window,
            span=s.span,
            cache_width=s.cache_width,
            shares_kv=s.shares_kv_with is not None,
        )
        for key, indices in rows.items()
        for s in (first[key],)
    )


def sharing_of(settings: Settings, slots: tuple[LayerFacts, ...]) -> Value[str]:
    """Who reads whose K/V, in one sentence."""
    readers = [s.index for s in slots if s.shares_kv_with is not None]
    if not readers:
        return Value("none", Evidence("absent"))
    owners = sum(s.owns_cache for s in slots)
    total = sum(s.grows for s in slots)
    keys = tuple(
        settings.where(k) for k in ("num_kv_shared_layers", "kv_source_layers", "cla_share_factor") if settings.has(k)
    )
    last = readers == list(range(len(slots) - len(readers), len(slots)))
    which = f"last {len(readers)} layers" if last else f"{len(readers)} layers"
    text = f"{which} reuse earlier K/V of the same type: {owners} KV slots for {total} layers"
    return Value(text, Evidence("key" if keys else "class-default", keys))


def k_eq_v_of(settings: Settings, slots: tuple[LayerFacts, ...]) -> Value[str | None]:
    """Whether V is K's tensor, or starts from K's projection."""
    if any(s.v_head_dim == 0 for s in slots if s.grows):
        return Value("V is the same tensor as K: one cache per layer", Evidence("class-fact"))
    if any(s.k_eq_v for s in slots):
        evidence = Evidence("key", (settings.where("attention_k_eq_v"),))
        return Value("full layers have no V projection: V starts from the K projection, its cache is its own", evidence)
    return Value(None, Evidence("absent"))


def nope_flags(settings: Settings, kinds: list[str]) -> list[bool]:
    """True for layers without position encoding, by no_rope_layers, layer_rope_theta or the class."""
    count = len(kinds)
    theta = settings.value("layer_rope_theta")
    if isinstance(theta, list) and len(theta) == count:
        return [not t for t in theta]
    if settings.has("no_rope_layers") or settings.info.reads("no_rope_layers"):
        spec = {"flags": "no_rope_layers", "interval": {"key": "no_rope_layer_interval"}, "empty_is_default": True}
        flags = layer_flags(spec, count, settings)
        if flags is not None:
            return [not on for on in flags[0]]
    if settings.info.facts.get("nope") == "full":
        has_sliding = any(k in ("sliding", "hybrid_sliding") for k in kinds)
        return [has_sliding and k in ("full", "hybrid") for k in kinds]
    return [False] * count


def sparse_span(settings: Settings) -> int | None:
    """Keys of the local part of a block-sparse pattern."""
    blocks = settings.integer(settings.get("blocksparse_num_local_blocks"), low=0)
    size = settings.integer(settings.get("blocksparse_block_size"), low=0)
    return blocks.value * size.value if blocks and size and blocks.value and size.value else None
