"""Configuration for Qwen3 MoE (30B-A3B family)."""

from typing import List, Optional

from transformers.configuration_utils import PretrainedConfig


class Qwen3MoeConfig(PretrainedConfig):
    model_type = "qwen3_moe"

    def __init__(
        self,
        vocab_size: int = 151936,
        hidden_size: int = 2048,
        intermediate_size: int = 6144,
        num_hidden_layers: int = 48,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 4,
        head_dim: Optional[int] = None,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1000000.0,
        max_position_embeddings: int = 40960,
        moe_intermediate_size: int = 768,
        num_experts_per_tok: int = 8,
        num_experts: int = 128,
        norm_topk_prob: bool = False,
        mlp_only_layers: Optional[List[int]] = None,
        decoder_sparse_step: int = 1,
        attention_bias: bool = False,
        tie_word_embeddings: bool = False,
        sliding_window: Optional[int] = None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.moe_intermediate_size = moe_intermediate_size
        self.num_experts_per_tok = num_experts_per_tok
        self.num_experts = num_experts
        self.norm_topk_prob = norm_topk_prob
        self.mlp_only_layers = mlp_only_layers or []
        self.decoder_sparse_step = decoder_sparse_step
        self.attention_bias = attention_bias
        self.tie_word_embeddings = tie_word_embeddings
        self.sliding_window = sliding_window
        super().__init__(**kwargs)
        if self.mlp_only_layers or self.decoder_sparse_step != 1:
            raise ValueError("only fully sparse checkpoints are supported")
