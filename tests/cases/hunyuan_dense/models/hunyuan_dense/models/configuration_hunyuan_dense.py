from transformers.configuration_utils import PretrainedConfig


class HunYuanConfig(PretrainedConfig):
    model_type = "hunyuan_v1_dense"

    def __init__(
            self,
            vocab_size=128167,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=None,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            attention_bias=False,
            tie_word_embeddings=False,
            **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        rope = kwargs.pop("rope_parameters", None) or rope_scaling or {}
        self.rope_base = rope.get("rope_theta", rope_theta)
        self.rope_alpha = rope.get("alpha") or 1.0
        self.attention_bias = attention_bias
        # keys of the MoE and CLA family members: not used by the dense models
        for name in ("cla_share_factor", "use_cla", "dense_list", "num_experts", "org_vocab_size"):
            kwargs.pop(name, None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
