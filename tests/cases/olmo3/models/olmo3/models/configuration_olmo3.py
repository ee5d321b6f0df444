# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class Olmo3Config(PretrainedConfig):
    model_type = "olmo3"

    def __init__(
        self,
        vocab_size=100278,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        max_position_embeddings=65536,
        pad_token_id=None,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        attention_bias=False,
        rms_norm_eps=1e-6,
        sliding_window=4096,
        layer_types=None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        self.rope_theta = rope_theta
        # 仅 full_attention 层使用 yarn
        self.full_attention_yarn = kwargs.pop("rope_scaling", None)
        self.attention_bias = attention_bias
        self.rms_norm_eps = rms_norm_eps
        self.sliding_window = sliding_window
        self.layer_types = layer_types
        if self.layer_types is None:
            self.layer_types = [
                "sliding_attention" if (i + 1) % 4 != 0 else "full_attention" for i in range(self.num_hidden_layers)
            ]
        super().__init__(**kwargs)
