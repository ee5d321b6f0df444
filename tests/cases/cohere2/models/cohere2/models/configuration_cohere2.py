# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class R7BConfig(PretrainedConfig):
    model_type = "cohere2"

    def __init__(
        self,
        vocab_size=256000,
        hidden_size=4096,
        intermediate_size=14336,
        logit_scale=0.25,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=132096,
        layer_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_parameters=None,
        attention_bias=False,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
        pad_token_id=0,
        bos_token_id=5,
        eos_token_id=255001,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.logit_scale = logit_scale
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.rope_theta = (rope_parameters or {}).get("rope_theta", rope_theta)
        self.attention_bias = attention_bias
        self.sliding_window = sliding_window
        self.sliding_window_pattern = sliding_window_pattern
        # every 4th layer is global
        self.layer_types = layer_types if layer_types is not None else [
            "sliding_attention" if (i + 1) % sliding_window_pattern else "full_attention"
            for i in range(num_hidden_layers)
        ]
        kwargs.pop("head_dim", None)
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
