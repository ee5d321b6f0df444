from transformers import PretrainedConfig


class PersimmonConfig(PretrainedConfig):
    model_type = "persimmon"

    def __init__(self, vocab_size=262144, hidden_size=4096, intermediate_size=16384, num_hidden_layers=36,
                 num_attention_heads=64, hidden_act="relu2", max_position_embeddings=16384, layer_norm_eps=1e-5,
                 rope_theta=25000.0, partial_rotary_factor=0.5, qk_layernorm=True, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.rotary_base = rope_theta
        self.rotary_share = partial_rotary_factor
        self.qk_layernorm = qk_layernorm
        super().__init__(**kwargs)
