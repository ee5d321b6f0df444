from transformers.configuration_utils import PretrainedConfig


class StableLmEpochConfig(PretrainedConfig):

    model_type = "stablelm"

    def __init__(self,
                 vocab_size=50304,
                 hidden_size=2560,
                 intermediate_size=6912,
                 num_hidden_layers=32,
                 num_attention_heads=32,
                 num_key_value_heads=32,
                 layer_norm_eps=1e-5,
                 max_position_embeddings=4096,
                 rope_theta=10000,
                 partial_rotary_factor=0.25,
                 use_qkv_bias=False,
                 use_parallel_residual=False,
                 tie_word_embeddings=False,
                 **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.layer_norm_eps = layer_norm_eps
        self.max_position_embeddings = max_position_embeddings
        rope = kwargs.get("rope_parameters") or {}
        self.rope_theta = rope.get("rope_theta", rope_theta)
        self.partial_rotary_factor = rope.get("partial_rotary_factor", partial_rotary_factor)
        self.use_qkv_bias = use_qkv_bias
        self.use_parallel_residual = use_parallel_residual
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
