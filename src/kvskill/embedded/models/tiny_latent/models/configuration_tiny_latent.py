"""Fields of config.json that tiny_latent reads."""

from transformers import PretrainedConfig


class TinyLatentConfig(PretrainedConfig):
    model_type = "deepseek_v2"

    def __init__(
        self,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rms_norm_eps = rms_norm_eps
        # transformers 5 keeps rope_theta inside rope_parameters
        self.rope_base = (kwargs.pop("rope_parameters", None) or {}).get("rope_theta", rope_theta)
        super().__init__(**kwargs)
