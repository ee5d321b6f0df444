from transformers import PretrainedConfig


class ApertusConfig(PretrainedConfig):
    model_type = "apertus"
    default_theta = 12000000.0

    def __init__(self, vocab_size=131072, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=None, hidden_act="xielu", max_position_embeddings=65536,
                 rms_norm_eps=1e-5, rope_parameters=None, attention_bias=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads if num_key_value_heads is not None else num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": self.default_theta}
        self.theta = self.rope_parameters["rope_theta"]
        self.attention_bias = attention_bias
        super().__init__(**kwargs)
