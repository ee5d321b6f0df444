# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class Exaone4Config(PretrainedConfig):
    model_type = "exaone4"

    def __init__(
        self,
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=27392,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=None,
        hidden_act="silu",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        rope_scaling=None,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim if head_dim is not None else hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        # one flat dict, whatever release wrote the file
        rope = dict(kwargs.pop("rope_parameters", None) or rope_scaling or {})
        rope.setdefault("rope_theta", rope_theta)
        rope.setdefault("rope_type", "default")
        self.rope_settings = rope
        self.sliding_window = sliding_window
        self.sliding_window_pattern = sliding_window_pattern
        if layer_types is None:
            pattern = 4 if isinstance(sliding_window_pattern, str) else sliding_window_pattern
            layer_types = [
                "sliding_attention" if sliding_window and (i + 1) % pattern else "full_attention"
                for i in range(num_hidden_layers)
            ]
        self.layer_types = layer_types
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
