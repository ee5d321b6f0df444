from transformers import PretrainedConfig


class Dots1Config(PretrainedConfig):
    model_type = "dots1"

    def __init__(self, vocab_size=152064, hidden_size=4608, intermediate_size=10944, moe_intermediate_size=1408,
                 num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=32, head_dim=None,
                 n_shared_experts=None, n_routed_experts=None, n_group=1, topk_group=1, num_experts_per_tok=None,
                 first_k_dense_replace=0, norm_topk_prob=False, routed_scaling_factor=1.0, rms_norm_eps=1e-6,
                 max_position_embeddings=2048, rope_theta=10000.0, attention_bias=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.n_shared_experts = n_shared_experts
        self.n_routed_experts = n_routed_experts
        self.n_group = n_group
        self.topk_group = topk_group
        self.num_experts_per_tok = num_experts_per_tok
        self.first_k_dense_replace = first_k_dense_replace
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.rope_base = rope_theta
        self.attention_bias = attention_bias
        super().__init__(**kwargs)
