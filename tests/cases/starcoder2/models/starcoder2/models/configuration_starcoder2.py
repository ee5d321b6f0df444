# coding=utf-8
from typing import Optional

from transformers import PretrainedConfig


class StarCoderConfig(PretrainedConfig):
    model_type = "starcoder2"

    def __init__(
        self,
        vocab_size: int = 49152,
        hidden_size: int = 3072,
        intermediate_size: int = 12288,
        num_hidden_layers: int = 30,
        num_attention_heads: int = 24,
        num_key_value_heads: int = 2,
        hidden_act: str = "gelu_pytorch_tanh",
        max_position_embeddings: int = 4096,
        norm_epsilon: float = 1e-5,
        rope_theta: float = 10000.0,
        sliding_window: Optional[int] = None,
        use_bias: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.norm_epsilon = norm_epsilon
        rope_parameters = kwargs.get("rope_parameters") or {}
        self.rope_theta = rope_parameters.get("rope_theta", rope_theta)
        self.sliding_window = sliding_window
        self.use_bias = use_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
