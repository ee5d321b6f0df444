# coding=utf-8
"""Phi-4-mini configuration (a Phi-3 descendant with partial rotary embeddings)."""
from transformers.configuration_utils import PretrainedConfig


class Phi4MiniConfig(PretrainedConfig):
    model_type = "phi3"

    def __init__(
        self,
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        sliding_window=262144,
        tie_word_embeddings=True,
        pad_token_id=None,
        **kwargs,
    ):
        scaling = kwargs.pop("rope_scaling", None)
        self.short_factor = scaling["short_factor"] if scaling else None
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.original_max_position_embeddings = original_max_position_embeddings
        self.partial_rotary_factor = partial_rotary_factor
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        # wider than the context: every layer attends to everything
        self.sliding_window = sliding_window
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        super().__init__(**kwargs)

    @property
    def rotary_dim(self):
        return int(self.hidden_size // self.num_attention_heads * self.partial_rotary_factor)
