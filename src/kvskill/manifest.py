"""The selection manifest: what `analyze` decided, why, and all that `apply` needs.

Written as `kv_manifest.yaml` beside the model. Equal input gives equal bytes: no timestamps, sorted inputs,
fixed key order. `overrides` is the part that people write; it survives re-analysis.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = [
    "CacheSpec",
    "Decision",
    "Evidence",
    "FaCall",
    "Group",
    "InputFile",
    "Manifest",
    "ManualTask",
    "MemoryPlan",
    "ModelRef",
    "Overrides",
    "TargetProfile",
    "dump_manifest",
    "load_manifest",
    "load_overrides",
]

SCHEMA_VERSION = 1
MANIFEST_NAME = "kv_manifest.yaml"

T = TypeVar("T")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # built on first use: import stays cheap


class Evidence(_Model):
    """Where a decision comes from: a config key, a code span, a progress.md line, an option, an override."""

    kind: Literal["config", "code", "progress", "option", "override", "target", "default", "rule"]
    ref: str  # "config.json:sliding_window", "models/x/modeling_x.py:120:9", "progress.md:14", "--mode"
    note: str = ""


class Decision(_Model, Generic[T]):
    """A value with its source. `source` is the evidence kind that decided."""

    value: T
    source: str
    evidence: tuple[Evidence, ...] = ()


class InputFile(_Model):
    """One file that was read. `path` is relative to the repository (or the model folder without one)."""

    path: str
    sha256: str


class ModelRef(_Model):
    """The model and the classes that play a part, by name, as found in the modeling files."""

    name: str
    folder: str
    modeling: tuple[str, ...] = ()
    config_file: str | None = None
    config_class: str | None = None
    config_module: str | None = None
    causal_lm: str | None = None
    model: str | None = None
    decoder_layer: str | None = None
    attention: tuple[str, ...] = ()
    mtp: str | None = None
    input_era: Literal["padded-2d", "packed-1d"] | None = None
    state: Literal["legacy", "paged", "half-migrated", "paged-by-hand", "none"] = "none"


class CacheSpec(_Model):
    """One cache entry of a layer. `num_head` and `dtype` are the expressions that the code will use."""

    name: str
    dim: int | str
    num_head: str
    dtype: str


class FaCall(_Model):
    """How the fused attention operator is called in one phase."""

    version: Literal[1, 2]
    layout: str
    sparse_mode: int
    mask: bool
    pre_tokens: int | str | None = None
    next_tokens: int | None = None
    q_lengths: str
    kv_lengths: str
    reads: Literal["fresh", "cache"]


class Group(_Model):
    """Layers that share one cache geometry and one block manager. `reasons` name the selection rules that shaped it."""

    layers: tuple[int, ...]
    attention: Literal["MHA", "MQA", "GQA", "MLA"]
    attn_type: Literal["FullAttention", "SlidingWindow"]
    manager_key: str | None = None
    q_heads: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    caches: tuple[CacheSpec, ...] = ()
    sliding_window: int | None = None
    sinks: bool = False
    scale_value: float | None = None
    scale_expr: str | None = None
    scale_kind: str | None = None
    prefill: FaCall | None = None
    decode: FaCall | None = None
    reasons: tuple[Evidence, ...] = ()


class TargetProfile(_Model):
    """What the target repository and its torch_npu offer; probed from source, never from the docs alone.

    `block_size_on` says who carries block_size: ModelCacheInfo (before 2026-06-11) or each CacheEntry.
    `registers_groups` says that the model, not the comm manager, registers communication groups.
    `paged` is False for a framework that has no cache entries at all. `config_fields` lists, per attribute of the
    configuration object, the fields that the target's dataclasses really have. `torch_npu` holds every release that
    fits what is known, `operators` what they agree on (None: they differ). `null_block_zeroed` says whether fresh
    cache memory is zeroed (None: not seen).
    """

    found: bool
    root: str | None = None
    paged: bool = True
    block_size_on: Literal["model", "entry"] = "entry"
    cache_entry_fields: tuple[str, ...] = ()
    layer_cache_info_fields: tuple[str, ...] = ()
    model_cache_info_fields: tuple[str, ...] = ()
    forward_metadata_fields: tuple[str, ...] = ()
    config_fields: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    cache_info_module: str | None = "executor.core.kv_cache.cache_info"
    forward_metadata_module: str | None = "executor.utils.forward_metadata"
    registers_groups: bool = True
    registration: str | None = None
    input_era: Literal["padded-2d", "packed-1d"] = "packed-1d"
    attn_types: tuple[str, ...] = ("FullAttention", "SlidingWindow")
    fixed_block_types: tuple[str, ...] = ("SlidingWindow",)
    mamba_cache_entry: bool = True
    null_block_zeroed: bool | None = None
    default_block_size: int = 128
    torch_npu: tuple[str, ...] = ()
    torch_npu_source: str = "assumed"
    fa_version: Literal[1, 2] = 2
    fa_reason: str = ""
    kv_rmsnorm_rope_version: Literal[1, 2] = 2
    operators: dict[str, bool | None] = Field(default_factory=dict)
    operator_profile: str = "default"
    notes: tuple[str, ...] = ()


class MemoryPlan(_Model):
    """Bytes per rank, Legacy against Paged, from the framework's own formulas.

    `paged_bytes` are the cache tensors themselves; `padding_bytes` what the allocator adds to align them.
    """

    yaml: str | None = None
    batch_size: int
    batch_per_rank: int = 1
    input_len: int
    max_new_tokens: int
    tp: int
    block_size: int
    next_n: int = 0
    max_total_len: int = 0
    legacy_bytes: int
    paged_bytes: int
    padding_bytes: int = 0
    blocks: dict[str, int] = Field(default_factory=dict)


class ManualTask(_Model):
    """A task that the tool leaves to a person or agent. Blocking: `apply` exits 3 and writes nothing."""

    id: str
    blocking: bool
    code: str
    path: str
    line: int
    col: int
    what: str
    why: str
    check: str


class Overrides(_Model):
    """Choices that people write into the manifest; they win over the analysis and survive it."""

    deployment: Literal["framework", "standalone"] | None = None
    kv_mode: Literal["paged", "legacy"] | None = None
    fa_version: Literal[1, 2] | None = None
    window: Literal["hf", "upstream"] | None = None
    block_size: int | None = None
    mla_cache: Literal["nz", "nd"] | None = None
    mla_prefill: Literal["expanded", "absorbed"] | None = None


class Manifest(_Model):
    """The whole contract between `analyze`, `apply`, `check` and `verify`."""

    schema_version: int = SCHEMA_VERSION
    tool_version: str
    inputs: tuple[InputFile, ...]
    model: ModelRef
    deployment: Decision[Literal["framework", "standalone"]]
    kv_mode: Decision[Literal["paged", "legacy", "out-of-scope"]]
    kv_grounds: tuple[str, ...] = ()
    target: TargetProfile
    fa_version: Decision[Literal[1, 2]]
    mla_absorb: Decision[bool]
    mixed_attn_types: Decision[bool]
    block_size: Decision[int]
    window_rule: Decision[Literal["hf", "upstream"]]
    layer_pattern: str = ""
    groups: tuple[Group, ...] = ()
    mtp_layers: int = 0
    sublayers: int = 1
    memory: MemoryPlan | None = None
    yamls: tuple[str, ...] = ()
    overrides: Overrides = Overrides()
    findings: tuple[dict[str, Any], ...] = ()
    manual: tuple[ManualTask, ...] = ()

    @property
    def blocking(self) -> tuple[ManualTask, ...]:
        """The tasks that stop `apply`."""
        return tuple(t for t in self.manual if t.blocking)


_HEADER = "# Written by `kvskill analyze`. Edit only `overrides:`; the rest is overwritten.\n"


def dump_manifest(manifest: Manifest) -> str:
    """YAML text; equal manifests give equal text."""
    data = manifest.model_dump(mode="json")
    return _HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)


def load_manifest(path: Path, shown: str | None = None) -> Manifest:
    """Read a manifest. Raises InputError: KV010 unreadable, KV011 not YAML, KV012 wrong fields."""
    shown = shown or path.name

    def fail(code: str, fact: str, todo: str) -> InputError:
        return InputError(Diagnostic(code, Severity.ERROR, fact, todo, Span(shown)))

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise fail("KV010", f"The manifest cannot be read ({exc}).", "Run `kvskill analyze` first.") from None
    except yaml.YAMLError as exc:
        raise fail("KV011", f"The manifest is not valid YAML ({exc}).", "Run `kvskill analyze` again.") from None
    try:
        return Manifest.model_validate(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise fail(
            "KV012",
            f"The manifest field `{where}` is wrong ({first['msg']}).",
            "Correct `overrides:` or delete the file and run `kvskill analyze` again.",
        ) from None


def load_overrides(path: Path, shown: str | None = None) -> Overrides:
    """The `overrides:` of a manifest of any tool version; nothing else is read.

    Raises InputError: KV010 unreadable, KV011 not YAML, KV012 a wrong override (re-analysis would lose it).
    """
    shown = shown or path.name
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        fact, todo = f"The manifest cannot be read ({exc}).", "Repair or delete it."
        raise InputError(Diagnostic("KV010", Severity.ERROR, fact, todo, Span(shown))) from None
    except yaml.YAMLError as exc:
        line = getattr(getattr(exc, "problem_mark", None), "line", 0) + 1
        fact = f"The manifest is not valid YAML ({getattr(exc, 'problem', None) or 'syntax'})."
        todo = "Repair it: its overrides would be lost. Or delete it."
        raise InputError(Diagnostic("KV011", Severity.ERROR, fact, todo, Span(shown, line))) from None
    try:
        return Overrides.model_validate((data.get("overrides") or {}) if isinstance(data, dict) else {})
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        fact = f"The override `{where}` is wrong ({first['msg']})."
        todo = f"Known overrides: {', '.join(Overrides.model_fields)}."
        raise InputError(Diagnostic("KV012", Severity.ERROR, fact, todo, Span(shown))) from None
