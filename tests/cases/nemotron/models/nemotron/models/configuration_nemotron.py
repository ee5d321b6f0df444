from transformers.configuration_utils import PretrainedConfig


class MinitronConfig(PretrainedConfig):
    model_type = 'nemotron'

    def __init__(self, vocab_size=256000, hidden_size=6144, intermediate_size=24576, num_hidden_layers=32,
                 num_attention_heads=48, head_dim=None, num_key_value_heads=None, max_position_embeddings=4096,
                 norm_eps=1e-5, rope_theta=10000.0, partial_rotary_factor=0.5, attention_bias=False,
                 mlp_bias=False, tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.norm_eps = norm_eps
        rope = kwargs.pop('rope_parameters', None) or {}
        self.rope_theta = rope.get('rope_theta', rope_theta)
        self.partial_rotary_factor = rope.get('partial_rotary_factor', partial_rotary_factor)
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
