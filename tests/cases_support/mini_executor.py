"""A few names of the framework's `executor` package, enough to build and drive a Legacy model.

The case models import `executor.core.config`, `executor.utils.forward_metadata`,
`executor.model_loader.weight_utils` and, where a migrator chose paged entries with plain attention,
`executor.core.kv_cache.cache_info`. The check of these forms (legacy_check.py) must not depend on a
converter, a verifier or a framework tree, so those modules are made here. Conversions are judged by
`kvskill verify` in real trees, not by this.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CommManager", "ForwardMetaData", "InferenceConfig", "install", "make_config"]


@dataclass
class DataConfig:
    dataset: str = "default"
    dataset_path: str = ""
    input_truncated_len: int = 256


@dataclass
class ModelConfig:
    model_name: str = "model"
    model_path: str = ""
    output_path: str = ""
    dtype: str = "bfloat16"
    with_ckpt: bool = True
    next_n: int = 0
    exe_mode: str = "eager"
    enable_cache_compile: bool = False
    force_eplb: bool = False
    enable_profiler: bool = False
    enable_weight_nz: bool = True
    custom_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class ParallelConfig:
    world_size: int = 1
    global_rank: int = 0
    local_rank: int = 0
    attn_tp_size: int = 1
    attn_dp_size: int = 1
    embed_tp_size: int = 1
    embed_dp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    lmhead_tp_size: int = 1
    dense_tp_size: int = 1
    o_proj_tp_size: int = 1
    cp_size: int = 1


@dataclass
class SchedulerConfig:
    batch_size: int = 1
    max_new_tokens: int = 32
    max_prefill_tokens: int = 0
    batch_size_per_dp_rank: int = 1
    mem_fraction_static: float = 0.85
    block_size: int = 128


@dataclass
class InferenceConfig:
    model_config: ModelConfig
    data_config: DataConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig


@dataclass
class ForwardMetaData:
    is_prefill: bool = False
    attention_mask: torch.Tensor | None = None
    kv_len: torch.Tensor | None = None
    actual_seq_lengths_kv: torch.Tensor | None = None
    actual_seq_lengths_q: torch.Tensor | None = None
    actual_seq_lengths_cu_kv: torch.Tensor | None = None
    actual_seq_lengths_cu_q: torch.Tensor | None = None
    actual_seq_lengths_cu_list_kv: list[int] | None = None
    actual_seq_lengths_cu_list_q: list[int] | None = None
    actual_seq_lengths_list_kv: list[int] | None = None
    actual_seq_lengths_list_q: list[int] | None = None
    prompt_tokens: int = 0
    block_table: dict[str, torch.Tensor] | None = None
    slot_mapping: dict[str, torch.Tensor] | None = None


@dataclass
class CacheEntry:
    cache_name: str
    attn_type: str
    dim: int | list[int]
    num_head: int
    dtype: torch.dtype
    needs_block: bool
    sliding_window: int | None = None
    block_size: int | None = None
    manager_key: str | None = None
    tensor_setter: Callable[[torch.Tensor], None] | None = None


@dataclass
class LayerCacheInfo:
    layer_idx: int
    caches: list[CacheEntry]


@dataclass
class ModelCacheInfo:
    num_layers: int
    layer_infos: list[LayerCacheInfo]
    is_mla_backend: bool = False


class CommManager:
    """Groups by name. A group nobody registered raises KeyError, as in the framework.

    `precreated=True` is the era in which the manager made the groups itself (no `register_group`).
    """

    def __init__(self, parallel: ParallelConfig, precreated: bool) -> None:
        self.config = parallel
        self._groups: dict[str, Any] = {}
        if precreated:
            everyone = dist.group.WORLD if parallel.attn_tp_size > 1 else None
            self._groups = {"attn_tp_group": everyone, "embed_tp_group": None, "lmhead_tp_group": None}
            if parallel.moe_tp_size > 1:
                self._groups["moe_tp_group"] = dist.group.WORLD
        else:
            self.register_group = self._register_group

    def _register_group(self, name: str, group_num: int = 1, group_size: int = 1, **_: Any) -> Any:
        if group_num * group_size != self.config.world_size:
            raise ValueError(f"{name}: {group_num} * {group_size} is not the world size")
        self._groups[name] = dist.group.WORLD if group_size > 1 else None
        return self._groups[name]

    def has_group(self, name: str) -> bool:
        return name in self._groups

    def get_group(self, name: str) -> Any:
        return self._groups[name]

    def get_rank(self, name: str) -> int:
        group = self._groups[name]
        return 0 if group is None else int(dist.get_rank(group))


def default_weight_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy, and raise on another shape (the framework's own only logs it)."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"{tuple(loaded_weight.shape)} into {tuple(param.shape)}")
    param.data.copy_(loaded_weight)


def make_config(sections: dict[str, Any], rank: int, world: int, prompt_len: int, new: int) -> InferenceConfig:
    """The YAML's sections with lengths for this run, batch 1 and `world` attention ranks."""
    parallel = dict(sections.get("parallel_config") or {})
    parallel.update(world_size=world, attn_tp_size=world, global_rank=rank, local_rank=rank)
    for key in ("moe_tp_size", "lmhead_tp_size", "embed_tp_size"):
        if world == 1 or parallel.get(key, 1) > world:
            parallel[key] = 1
    config = InferenceConfig(
        ModelConfig(**(sections.get("model_config") or {})),
        DataConfig(**{**(sections.get("data_config") or {}), "input_truncated_len": prompt_len}),
        ParallelConfig(**parallel),
        SchedulerConfig(
            **{
                **(sections.get("scheduler_config") or {}),
                "batch_size": 1,
                "max_new_tokens": new,
                "block_size": 16,
            }
        ),
    )
    config.parallel_config.attn_dp_size = world // config.parallel_config.attn_tp_size
    config.parallel_config.moe_ep_size = world // config.parallel_config.moe_tp_size
    config.scheduler_config.batch_size_per_dp_rank = 1
    return config


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def install() -> None:
    """Put the modules into `sys.modules`. `get_forward_metadata` is there because some files import it."""
    state = {"now": ForwardMetaData()}

    def get_forward_metadata() -> ForwardMetaData:
        return state["now"]

    def set_forward_metadata(**changes: Any) -> None:
        state["now"] = replace(state["now"], **changes)

    if "executor" in sys.modules:
        return
    for package in ("executor", "executor.core", "executor.utils", "executor.model_loader"):
        _module(package).__path__ = []
    entries = {cls.__name__: cls for cls in (CacheEntry, LayerCacheInfo, ModelCacheInfo)}
    cache_info = _module("executor.core.kv_cache.cache_info", **entries)
    _module("executor.core.kv_cache", cache_info=cache_info, **entries).__path__ = []
    _module(
        "executor.core.config",
        **{
            cls.__name__: cls
            for cls in (
                CommManager,
                DataConfig,
                InferenceConfig,
                ModelConfig,
                ParallelConfig,
                SchedulerConfig,
            )
        },
    )
    metadata: dict[str, type | Callable[..., Any]] = {
        "ForwardMetaData": ForwardMetaData,
        "get_forward_metadata": get_forward_metadata,
        "set_forward_metadata": set_forward_metadata,
    }
    _module("executor.utils.forward_metadata", **metadata)
    _module("executor.model_loader.weight_utils", default_weight_loader=default_weight_loader)
