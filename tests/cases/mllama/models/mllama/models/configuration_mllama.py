from transformers.configuration_utils import PretrainedConfig


class VisionLlamaTextConfig(PretrainedConfig):
    model_type = "mllama_text_model"

    def __init__(
        self,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        cross_attention_layers=None,
        max_image_tokens=1601,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.rms_norm_eps = rms_norm_eps
        rope = dict(kwargs.pop("rope_parameters", None) or rope_scaling or {})
        rope.setdefault("rope_theta", rope_theta)
        self.rope = rope
        self.cross_attention_layers = cross_attention_layers or [3, 8, 13, 18, 23, 28, 33, 38]
        self.max_image_tokens = max_image_tokens
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
