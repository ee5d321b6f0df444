"""Configuration of tiny_mixed: sliding-window and full attention layers, told apart by `layer_types`."""

from transformers import PretrainedConfig


class TinyMixedConfig(PretrainedConfig):
    """The fields of Qwen2, with tiny defaults."""

    model_type = "qwen2"

    def __init__(
        self,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="silu",
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=0,
        layer_types=None,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window
        self.max_window_layers = max_window_layers
        self.layer_types = layer_types or [
            "full_attention" if (layer_idx + 1) % 2 == 0 else "sliding_attention"
            for layer_idx in range(num_hidden_layers)
        ]
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
