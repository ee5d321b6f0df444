# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class M2Config(PretrainedConfig):
    model_type = "minimax_m2"

    def __init__(
        self,
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        rope_theta=5000000,
        max_position_embeddings=196608,
        rms_norm_eps=1e-6,
        num_local_experts=256,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        rope = kwargs.pop("rope_parameters", None) or {}
        if "partial_rotary_factor" in rope:
            rotary_dim = int(head_dim * rope["partial_rotary_factor"])
        self.rotary_dim = rotary_dim
        self.rope_theta = rope.get("rope_theta", rope_theta)
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
