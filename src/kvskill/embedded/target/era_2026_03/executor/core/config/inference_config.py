"""Settings of one inference process, read from the model's YAML."""

from dataclasses import dataclass, field

from executor.core.config.reading import check_divisible, check_heads, pick


@dataclass
class DataConfig:
    """Where prompts come from."""

    dataset: str = "default"
    dataset_path: str = ""

    @classmethod
    def from_dict(cls, values):
        return pick(cls, values)


@dataclass
class ModelConfig:
    """The model and how it runs. `next_n`: speculated tokens per step."""

    model_name: str = "model"
    model_path: str = ""
    output_path: str = ""
    dtype: str = "bfloat16"
    with_ckpt: bool = True
    next_n: int = 0
    exe_mode: str = "eager"
    enable_cache_compile: bool = False
    enable_static_kernel: bool = False
    force_eplb: bool = False
    enable_profiler: bool = False
    packed_sequence: bool = True
    enable_weight_nz: bool = True
    custom_params: dict = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values):
        config = pick(cls, values)
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
    embed_tp_size: int = 1
    embed_dp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    lmhead_tp_size: int = 1
    dense_tp_size: int = 1
    o_proj_tp_size: int = 1
    cp_size: int = 1
    kvp_size: int = 1

    @classmethod
    def from_dict(cls, values, global_rank, local_rank):
        config = pick(cls, values, global_rank=global_rank, local_rank=local_rank)
        check_divisible(
            config,
            ("attn_tp_size", "moe_tp_size", "embed_tp_size", "lmhead_tp_size", "dense_tp_size", "o_proj_tp_size",
             "cp_size", "kvp_size"),
        )
        config.attn_dp_size = config.world_size // config.attn_tp_size
        config.embed_dp_size = config.world_size // config.embed_tp_size
        config.moe_ep_size = config.world_size // config.moe_tp_size
        return config

    def validate_model_config(self, hf_config):
        check_heads(self, hf_config)


@dataclass
class SchedulerConfig:
    """Batches. Prompts are padded to `input_max_len`; `prefill_mini_batch` 0 means the whole batch at once."""

    batch_size: int = 1
    prefill_mini_batch: int = 0
    input_max_len: int = 1024
    max_new_tokens: int = 32
    batch_size_per_dp_rank: int = 1

    @classmethod
    def from_dict(cls, values):
        return pick(cls, values)


@dataclass
class InferenceConfig:
    """All sections."""

    model_config: ModelConfig
    data_config: DataConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig

    @classmethod
    def from_dict(cls, yaml_dict, global_rank=0, local_rank=0):
        config = cls(
            model_config=ModelConfig.from_dict(yaml_dict.get("model_config")),
            data_config=DataConfig.from_dict(yaml_dict.get("data_config")),
            parallel_config=ParallelConfig.from_dict(yaml_dict.get("parallel_config"), global_rank, local_rank),
            scheduler_config=SchedulerConfig.from_dict(yaml_dict.get("scheduler_config")),
        )
        scheduler = config.scheduler_config
        scheduler.batch_size_per_dp_rank = scheduler.batch_size // config.parallel_config.attn_dp_size
        rows = scheduler.batch_size_per_dp_rank
        scheduler.prefill_mini_batch = min(rows, scheduler.prefill_mini_batch) or rows
        return config

    def validate(self, hf_config=None):
        self.parallel_config.validate_model_config(hf_config)
