# ruff: noqa  (framework style on purpose)
from transformers import PretrainedConfig


class TwinConfig(PretrainedConfig):
    model_type = "deepseek_v3"

    def __init__(self, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-6, **kwargs):
        self.rope_theta = rope_theta
        self.stretch = dict(rope_scaling or kwargs.pop("rope_parameters", None) or {})
        self.rms_norm_eps = rms_norm_eps
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim",
                    "num_nextn_predict_layers", "max_position_embeddings"):
            setattr(self, key, kwargs.pop(key, None))
        super().__init__(**kwargs)
