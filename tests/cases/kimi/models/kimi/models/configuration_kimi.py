from transformers import PretrainedConfig


class KimiConfig(PretrainedConfig):
    model_type = "kimi_k2"

    def __init__(self, num_hidden_layers=61, rms_norm_eps=1e-6, rope_theta=50000.0, rope_scaling=None, **kwargs):
        self.num_hidden_layers = num_hidden_layers
        self.rms_norm_eps = rms_norm_eps
        self.rope_settings = dict(rope_scaling or kwargs.pop("rope_parameters", None) or {})
        self.rope_settings.setdefault("rope_theta", rope_theta)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
                    "n_shared_experts", "n_routed_experts", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank",
                    "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "num_experts_per_tok",
                    "first_k_dense_replace", "norm_topk_prob", "max_position_embeddings"):
            setattr(self, key, kwargs.pop(key, None))
        super().__init__(**kwargs)
