"""What a config.json says about a model's KV cache: frozen facts, each with its evidence.

Nothing here decides anything; the modules beside it fill these in. Field names that appear in `--json` are in
`report.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from kvskill.diagnostics import Diagnostic

__all__ = [
    "AttnType",
    "ConfigFacts",
    "Evidence",
    "ExtraCache",
    "KvGroup",
    "LayerFacts",
    "LayerKind",
    "MlaFacts",
    "MoeFacts",
    "MtpFacts",
    "QuantFacts",
    "RopeFacts",
    "ScaleFacts",
    "Source",
    "Value",
    "Verdict",
]

T_co = TypeVar("T_co", covariant=True)
Source = Literal["key", "class-default", "derived", "class-fact", "absent"]
# The two cache types a layer of the target framework can register; everything else is None.
AttnType = Literal["FullAttention", "SlidingWindow"]
LayerKind = Literal[
    "full",  # F  every earlier key is visible
    "sliding",  # S  the last `window` keys are visible
    "mla",  # M  latent cache, every earlier key is visible
    "chunked",  # C  keys of the same chunk are visible
    "blocksparse",  # B  a block pattern is visible
    "state",  # L  fixed-size recurrent, convolution or linear-attention state
    "cross",  # X  keys of another sequence, of fixed length
    "none",  # -  no cache (MLP, encoder)
]


@dataclass(frozen=True)
class Evidence:
    """Where a conclusion comes from: the kind of source, key paths in the file, and one line on how."""

    source: Source
    keys: tuple[str, ...] = ()
    how: str = ""

    def __str__(self) -> str:
        where = ", ".join(self.keys)
        return f"{where}: {self.how}" if where and self.how else where or self.how


@dataclass(frozen=True)
class Value(Generic[T_co]):
    """A value and its evidence."""

    value: T_co
    evidence: Evidence


@dataclass(frozen=True)
class LayerFacts:
    """One attention slot (most models: one per layer; a layer with two attention blocks has two).

    `window` counts the visible keys, the query's own included. `k_head_dim`/`v_head_dim` are elements per
    cached head; `v_head_dim` 0 means V is the same tensor as K. For MLA `kv_heads` is 1, `cache_width` is the
    cached elements per token (latent + rope), and the head dims are those of the expanded form.
    `shares_kv_with` is the index of the slot that owns the cache this one reads.
    """

    index: int
    kind: LayerKind
    attn_type: AttnType | None = None
    window: int | None = None
    span: int | None = None  # chunk or local span of chunked and block-sparse layers
    q_heads: int | None = None
    kv_heads: int | None = None
    k_head_dim: int | None = None
    v_head_dim: int | None = None
    cache_width: int | None = None
    shares_kv_with: int | None = None
    rope: bool = True  # False: the layer has no position encoding
    has_state: bool = False  # a recurrent or convolution state beside the K/V
    k_eq_v: bool = False  # V starts from the K projection
    scale: float | None = None

    @property
    def owns_cache(self) -> bool:
        """True when the slot has a growing K/V cache of its own."""
        return self.grows and self.shares_kv_with is None

    @property
    def grows(self) -> bool:
        """True when the slot reads a K/V cache that grows with the text."""
        return self.kind in ("full", "sliding", "mla", "chunked", "blocksparse")


@dataclass(frozen=True)
class KvGroup:
    """Slots with one cache geometry."""

    layers: int
    indices: tuple[int, ...]
    kind: LayerKind
    attn_type: AttnType | None
    q_heads: int | None
    kv_heads: int | None
    k_head_dim: int | None
    v_head_dim: int | None
    window: int | None = None
    span: int | None = None
    cache_width: int | None = None
    shares_kv: bool = False


@dataclass(frozen=True)
class MlaFacts:
    """Latent-attention widths; `q_lora_rank` None means the query is not compressed."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    evidence: Evidence

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Cached elements per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class ScaleFacts:
    """What the query-key product is multiplied with before the softmax."""

    value: float | None
    formula: str | None
    evidence: Evidence


@dataclass(frozen=True)
class RopeFacts:
    """Position encoding; `cos_sin_multiplier` scales cos and sin and is no part of the softmax scale."""

    kind: str
    parameters: dict[str, Any]
    evidence: Evidence
    cos_sin_multiplier: float | None = None
    cos_sin_rule: str | None = None
    rotary_dim: int | None = None  # None: the whole head
    by_layer_type: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MtpFacts:
    """Extra prediction layers; never part of `layers`."""

    count: int
    key: str | None
    other_keys: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MoeFacts:
    is_moe: bool
    experts: int | None = None
    key: str | None = None


@dataclass(frozen=True)
class QuantFacts:
    """Weight quantisation, and how K/V are stored when not in the model's dtype."""

    method: str | None
    kv_cache_scheme: Any
    kv_cache_quant: str | None
    evidence: Evidence


@dataclass(frozen=True)
class ExtraCache:
    """A cache beside the K/V: indexer keys, recurrent state, cross-attention K/V."""

    name: str
    layers: int
    evidence: Evidence
    head_dim: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Paged or not, and why. `grounds` are codes of the findings that block."""

    verdict: Literal["paged", "legacy-keep", "out-of-scope"]
    scope: str
    reason: str
    acceptable: tuple[str, ...]
    grounds: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfigFacts:
    """Everything that is concluded from one config."""

    shown: str
    model_type: str | None
    architecture: str | None
    text_path: str  # dotted path of the language model's settings, "" when flat
    text_model_type: str | None
    known_class: bool  # the class defaults know this model_type
    layers: tuple[LayerFacts, ...]
    layers_declared: Value[int | None]
    attention_kind: Literal["MHA", "GQA", "MQA", "MLA", "none"]
    layer_rule: Evidence
    sliding_window: Value[int | None]  # the one that takes effect
    sliding_window_raw: Value[int | None]
    q_heads: Value[int | None]
    kv_heads: Value[int | None]
    head_dim: Value[int | None]  # None for MLA and for models without attention
    naive_head_dim: int | None
    groups: tuple[KvGroup, ...]
    mla: MlaFacts | None
    rope: RopeFacts
    scale: ScaleFacts
    sinks: Value[str]
    softcap_attention: Value[float | None]
    softcap_final: Value[float | None]
    alibi: Value[bool]
    kv_sharing: Value[str]
    k_eq_v: Value[str | None]
    mtp: MtpFacts
    moe: MoeFacts
    quant: QuantFacts
    encoder_decoder: bool
    multimodal: bool
    extra_caches: tuple[ExtraCache, ...]
    class_defaults_needed: tuple[str, ...]
    verdict: Verdict
    watchpoints: tuple[str, ...]
    findings: tuple[Diagnostic, ...]
    acceptable_windows: tuple[int, ...]  # more than one where a key is read in two ways
    lookup: Callable[[str], Value[Any] | None] = field(repr=False, compare=False)

    def get(self, key: str) -> Value[Any] | None:
        """The value in force of a config key (nested settings, then class defaults), or None."""
        return self.lookup(key)

    @property
    def layer_pattern(self) -> str:
        """One character per slot; lower case: the slot reads another slot's K/V."""
        codes = {
            "full": "F",
            "sliding": "S",
            "mla": "M",
            "chunked": "C",
            "blocksparse": "B",
            "state": "L",
            "cross": "X",
            "none": "-",
        }
        return "".join(codes[x.kind].lower() if x.shares_kv_with is not None else codes[x.kind] for x in self.layers)

    @property
    def kv_layers_total(self) -> int:
        """Slots that own a growing K/V cache."""
        return sum(x.owns_cache for x in self.layers)
