# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class SmolConfig(PretrainedConfig):
    model_type = "smollm3"

    def __init__(
        self,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=2000000.0,
        use_sliding_window=False,
        sliding_window=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        params = kwargs.get("rope_parameters")
        self.rope_theta = params["rope_theta"] if params else rope_theta
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window
        if no_rope_layers is None:
            no_rope_layers = [int((i + 1) % no_rope_layer_interval != 0) for i in range(num_hidden_layers)]
        self.no_rope_layers = no_rope_layers
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
