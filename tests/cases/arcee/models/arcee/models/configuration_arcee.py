# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class AFMConfig(PretrainedConfig):
    model_type = "arcee"

    def __init__(
        self,
        vocab_size=128004,
        hidden_size=2560,
        intermediate_size=18432,
        num_hidden_layers=36,
        num_attention_heads=20,
        num_key_value_heads=4,
        head_dim=None,
        max_position_embeddings=65536,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope = {"rope_theta": rope_theta, **(kwargs.pop("rope_parameters", None) or rope_scaling or {})}
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
