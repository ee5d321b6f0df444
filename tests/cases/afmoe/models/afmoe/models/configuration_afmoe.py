from transformers import PretrainedConfig


class AfmoeConfig(PretrainedConfig):
    model_type = "afmoe"

    def __init__(self, vocab_size=200192, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=1408,
                 num_hidden_layers=32, num_dense_layers=1, num_attention_heads=16, num_key_value_heads=None,
                 head_dim=128, max_position_embeddings=16384, rms_norm_eps=1e-5, rope_theta=10000.0, num_experts=64,
                 num_experts_per_tok=6, num_shared_experts=2, route_scale=1.0, global_attn_every_n_layers=4,
                 sliding_window=1024, layer_types=None, mup_enabled=False, attention_bias=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_dense_layers = num_dense_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.base = rope_theta
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.num_shared_experts = num_shared_experts
        self.route_scale = route_scale
        self.sliding_window = sliding_window
        if layer_types is None:
            layer_types = [
                "sliding_attention" if (i + 1) % global_attn_every_n_layers else "full_attention"
                for i in range(num_hidden_layers)
            ]
        self.layer_types = layer_types
        self.mup_enabled = mup_enabled
        self.attention_bias = attention_bias
        super().__init__(**kwargs)
