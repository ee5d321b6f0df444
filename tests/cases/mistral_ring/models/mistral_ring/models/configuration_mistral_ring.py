from transformers.configuration_utils import PretrainedConfig


class RollingConfig(PretrainedConfig):
    model_type = "mistral"

    def __init__(self, vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=8, head_dim=None, rms_norm_eps=1e-5,
                 rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = (kwargs.pop("rope_parameters", None) or {}).get("rope_theta", rope_theta)
        self.sliding_window = sliding_window
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
