from transformers.configuration_utils import PretrainedConfig


class EncoderGemmaConfig(PretrainedConfig):
    model_type = "gemma3_text"

    def __init__(
        self,
        vocab_size=262144,
        hidden_size=768,
        intermediate_size=1152,
        num_hidden_layers=24,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_window_pattern=6,
        layer_types=None,
        use_bidirectional_attention=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rms_norm_eps = rms_norm_eps
        rope = kwargs.pop("rope_parameters", None) or {}
        self.rope_bases = {
            "full_attention": rope.get("full_attention", {}).get("rope_theta", rope_theta),
            "sliding_attention": rope.get("sliding_attention", {}).get("rope_theta", rope_local_base_freq),
        }
        self.query_pre_attn_scalar = query_pre_attn_scalar
        self.use_bidirectional_attention = use_bidirectional_attention
        # half of it to either side
        self.sliding_window = sliding_window // 2 + 1 if use_bidirectional_attention else sliding_window
        self.layer_types = layer_types or [
            "sliding_attention" if (i + 1) % sliding_window_pattern else "full_attention"
            for i in range(num_hidden_layers)
        ]
        super().__init__(pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id,
                         tie_word_embeddings=tie_word_embeddings, **kwargs)
