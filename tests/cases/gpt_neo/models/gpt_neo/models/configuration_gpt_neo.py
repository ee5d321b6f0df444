from transformers import PretrainedConfig


class GPTNeoConfig(PretrainedConfig):
    model_type = "gpt_neo"

    def __init__(self, vocab_size=50257, max_position_embeddings=2048, hidden_size=2048, num_layers=24, num_heads=16,
                 attention_types=None, intermediate_size=None, window_size=256, layer_norm_epsilon=1e-5, **kwargs):
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.num_hidden_layers = num_layers
        self.num_attention_heads = num_heads
        self.intermediate_size = intermediate_size
        self.window_size = window_size
        self.layer_norm_epsilon = layer_norm_epsilon
        self.attention_types = attention_types or [[["global", "local"], 12]]
        self.attention_layers = []
        for kinds, times in self.attention_types:
            for _ in range(times):
                self.attention_layers.extend(kinds)
        super().__init__(**kwargs)
