# coding=utf-8
"""Gemma 4 text configuration (decoder only, no per-layer embeddings)."""

from transformers.configuration_utils import PretrainedConfig


class Gemma4TextConfig(PretrainedConfig):
    model_type = "gemma4_text"

    def __init__(
        self,
        vocab_size=262144,
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        tie_word_embeddings=True,
        layer_rope=None,
        sliding_window=1024,
        layer_types=None,
        final_logit_softcapping=None,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        **kwargs,
    ):
        # Base class post-processing would merge per-layer-type rope settings into one; keep them under our own name
        rope = layer_rope or kwargs.pop("rope_parameters", None) or {}
        self.layer_rope = {
            "sliding_attention": {"rope_theta": 10000.0, **rope.get("sliding_attention", {})},
            "full_attention": {
                "rope_theta": 1000000.0, "partial_rotary_factor": 0.25, **rope.get("full_attention", {})
            },
        }
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_global_key_value_heads = num_global_key_value_heads
        self.head_dim = head_dim
        self.global_head_dim = global_head_dim
        self.attention_k_eq_v = attention_k_eq_v
        self.hidden_activation = hidden_activation
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self.sliding_window = sliding_window
        if layer_types is None:
            layer_types = [
                "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(num_hidden_layers)
            ]
        self.layer_types = layer_types
        self.final_logit_softcapping = final_logit_softcapping
        self.enable_moe_block = enable_moe_block
        self.num_experts = num_experts
        self.top_k_experts = top_k_experts
        self.moe_intermediate_size = moe_intermediate_size
        super().__init__(**kwargs)
