# coding=utf-8
"""Qwen2MoE model configuration"""
from transformers.configuration_utils import PretrainedConfig


class Qwen2MoeConfig(PretrainedConfig):
    model_type = "qwen2_moe"

    def __init__(
        self,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        hidden_act="silu",
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        decoder_sparse_step=1,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts_per_tok=4,
        num_experts=60,
        norm_topk_prob=False,
        mlp_only_layers=None,
        **kwargs,
    ):
        for name, value in list(locals().items()):
            if name not in ("self", "kwargs", "__class__"):
                setattr(self, name, value)
        self.mlp_only_layers = [] if mlp_only_layers is None else mlp_only_layers
        # use_sliding_window 恒为 False，不保留滑窗相关字段
        for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
            kwargs.pop(name, None)
        super().__init__(**kwargs)
