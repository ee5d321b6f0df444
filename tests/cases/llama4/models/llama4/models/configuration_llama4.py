from transformers.configuration_utils import PretrainedConfig


class ScoutTextConfig(PretrainedConfig):
    model_type = "llama4_text"

    def __init__(
        self,
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
        use_qk_norm=True,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.intermediate_size_mlp = intermediate_size_mlp
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rms_norm_eps = rms_norm_eps
        rope = kwargs.pop("rope_parameters", None) or {}
        self.rope_theta = rope.get("rope_theta", rope_theta)
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.interleave_moe_layer_step = interleave_moe_layer_step
        self.no_rope_layers = no_rope_layers or [
            int((i + 1) % no_rope_layer_interval != 0) for i in range(num_hidden_layers)]
        self.attention_chunk_size = attention_chunk_size
        self.layer_types = ["chunked_attention" if rope else "full_attention" for rope in self.no_rope_layers]
        self.attn_temperature_tuning = attn_temperature_tuning
        self.floor_scale = floor_scale
        self.attn_scale = attn_scale
        self.use_qk_norm = use_qk_norm
        kwargs.pop("layer_types", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
