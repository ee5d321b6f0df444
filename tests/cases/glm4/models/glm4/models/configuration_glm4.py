# coding=utf-8
# Copyright 2025 The GLM4 & ZhipuAI team and HuggingFace Inc. team.
from transformers.configuration_utils import PretrainedConfig


class Glm4Config(PretrainedConfig):
    model_type = "glm4"

    def __init__(
        self,
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        partial_rotary_factor=0.5,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-07,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        pad_token_id=151329,
        attention_bias=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.partial_rotary_factor = partial_rotary_factor
        self.head_dim = head_dim
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.pad_token_id = pad_token_id
        self.attention_bias = attention_bias
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)
