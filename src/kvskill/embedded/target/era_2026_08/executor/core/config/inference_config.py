"""Settings of one inference process, read from the model's YAML."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from executor.core.config.reading import check_divisible, check_heads, pick


class PlatformVersion(Enum):
    """Hardware generations."""

    A2 = "A2"
    A3 = "A3"
    ASCEND_950 = "950"

    def is_ascend_950(self):
        return self is PlatformVersion.ASCEND_950

    @classmethod
    def from_value(cls, value):
        return value if isinstance(value, cls) else cls(str(value))


@dataclass
class DataConfig:
    """Prompts. `input_truncated_len`: longest prompt in tokens."""

    dataset: str = "default"
    dataset_path: str = ""
    input_truncated_len: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: Optional[int] = None

    @classmethod
    def from_dict(cls, values):
        config = pick(cls, values)
        if config.temperature != 0.0:
            raise ValueError("this example framework decodes greedily: temperature must be 0")
        return config


@dataclass
class ModelConfig:
    """The model and how it runs. `next_n`: speculated tokens per step."""

    model_name: str = "model"
    model_path: str = ""
    output_path: str = ""
    dtype: str = "bfloat16"
    with_ckpt: bool = True
    next_n: int = 0
    platform_version: PlatformVersion = PlatformVersion.A3
    exe_mode: str = "eager"
    enable_cache_compile: bool = False
    enable_static_kernel: bool = False
    enable_dynamic_graph: bool = True
    force_eplb: bool = False
    enable_profiler: bool = False
    enable_weight_nz: bool = True
    enable_hadamard: bool = False
    hadamard_weight_path: str = ""
    custom_params: dict = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values):
        config = pick(cls, values)
        config.platform_version = PlatformVersion.from_value(config.platform_version)
        if config.exe_mode not in ("eager", "ge_graph", "npugraph_ex"):
            raise ValueError(f"exe_mode={config.exe_mode!r} is not one of eager, ge_graph, npugraph_ex")
        return config


@dataclass
class ParallelConfig:
    """Ranks. The *_dp_size and moe_ep_size values are derived."""

    world_size: int = 1
    global_rank: int = 0
    local_rank: int = 0
    attn_tp_size: int = 1
    attn_dp_size: int = 1
    offline_prefill_dp_group_size: int = 1
    cp_prefill_dp_size: int = 1
    embed_tp_size: int = 1
    embed_dp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    lmhead_tp_size: int = 1
    dense_tp_size: int = 1
    shared_tp_size: int = 1
    o_proj_tp_size: int = 1
    cp_size: int = 1

    @classmethod
    def from_dict(cls, values, global_rank, local_rank):
        config = pick(cls, values, global_rank=global_rank, local_rank=local_rank)
        check_divisible(
            config,
            ("attn_tp_size", "moe_tp_size", "embed_tp_size", "lmhead_tp_size", "dense_tp_size", "o_proj_tp_size",
             "shared_tp_size", "cp_size", "offline_prefill_dp_group_size"),
        )
        if config.cp_size > 1 or config.offline_prefill_dp_group_size > 1:
            raise ValueError("this example framework has no context parallelism: cp_size must be 1")
        config.cp_prefill_dp_size = config.world_size // (config.attn_tp_size * config.cp_size)
        config.attn_dp_size = config.world_size // config.attn_tp_size
        config.embed_dp_size = config.world_size // config.embed_tp_size
        config.moe_ep_size = config.world_size // config.moe_tp_size
        return config

    def validate_model_config(self, hf_config):
        check_heads(self, hf_config)


@dataclass
class SchedulerConfig:
    """Batches and cache blocks. `batch_size_per_dp_rank` is derived; `max_prefill_tokens` 0 means one full batch."""

    batch_size: int = 1
    max_new_tokens: int = 32
    max_prefill_tokens: int = 0
    batch_size_per_dp_rank: int = 1
    mem_fraction_static: float = 0.85
    block_size: int = 128
    num_reserved_decode_tokens: int = 64
    cp_mini_batch: int = -1

    @classmethod
    def from_dict(cls, values):
        return pick(cls, values)


@dataclass
class DisaggConfig:
    """Prefill and decode in separate processes; NONE is offline inference."""

    disaggregation_mode: str = "NONE"
    bootstrap_host: str = "0.0.0.0"
    bootstrap_port: int = 18800


@dataclass
class InferenceConfig:
    """All sections."""

    model_config: ModelConfig
    data_config: DataConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    disagg_config: DisaggConfig = field(default_factory=DisaggConfig)

    @classmethod
    def from_dict(cls, yaml_dict, global_rank=0, local_rank=0, disagg_config=None):
        config = cls(
            model_config=ModelConfig.from_dict(yaml_dict.get("model_config")),
            data_config=DataConfig.from_dict(yaml_dict.get("data_config")),
            parallel_config=ParallelConfig.from_dict(yaml_dict.get("parallel_config"), global_rank, local_rank),
            scheduler_config=SchedulerConfig.from_dict(yaml_dict.get("scheduler_config")),
            disagg_config=disagg_config or DisaggConfig(),
        )
        scheduler = config.scheduler_config
        scheduler.batch_size_per_dp_rank = scheduler.batch_size // config.parallel_config.attn_dp_size
        if scheduler.max_prefill_tokens == 0:
            scheduler.max_prefill_tokens = config.data_config.input_truncated_len * scheduler.batch_size_per_dp_rank
        return config

    def validate(self, hf_config=None):
        self.parallel_config.validate_model_config(hf_config)
