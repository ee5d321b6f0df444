from transformers.configuration_utils import PretrainedConfig


class MinistralConfig(PretrainedConfig):
    model_type = "ministral"

    def __init__(self, **kwargs):
        get = kwargs.pop
        self.vocab_size = get("vocab_size", 131072)
        self.hidden_size = get("hidden_size", 4096)
        self.intermediate_size = get("intermediate_size", 12288)
        self.num_hidden_layers = get("num_hidden_layers", 36)
        self.num_attention_heads = get("num_attention_heads", 32)
        self.num_key_value_heads = get("num_key_value_heads", 8)
        self.head_dim = get("head_dim", None) or self.hidden_size // self.num_attention_heads
        self.max_position_embeddings = get("max_position_embeddings", 32768)
        self.rms_norm_eps = get("rms_norm_eps", 1e-5)
        self.rope_theta = get("rope_theta", 1e8)
        self.sliding_window = get("sliding_window", 32768)
        self.tie_word_embeddings = get("tie_word_embeddings", False)
        layer_types = get("layer_types", None)
        if layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            layer_types = [kind] * self.num_hidden_layers
        self.layer_types = layer_types
        super().__init__(**kwargs)
