# coding=utf-8
from transformers import PretrainedConfig


class PhiMicrosoftConfig(PretrainedConfig):
    model_type = "phi"

    def __init__(
        self,
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=None,
        hidden_act="gelu_new",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        rope_parameters=None,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        if num_key_value_heads is None:
            num_key_value_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        if rope_parameters is not None:
            rope_theta = rope_parameters.get("rope_theta", rope_theta)
            partial_rotary_factor = rope_parameters.get("partial_rotary_factor", partial_rotary_factor)
        self.rope_theta = rope_theta
        self.partial_rotary_factor = partial_rotary_factor
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
