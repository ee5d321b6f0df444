from transformers.configuration_utils import PretrainedConfig


class OlmoPortConfig(PretrainedConfig):
    model_type = "olmo"

    def __init__(self, vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=None, rope_theta=10000.0, clip_qkv=None,
                 tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.rope_theta = (kwargs.pop("rope_parameters", None) or {}).get("rope_theta", rope_theta)
        self.clip_qkv = clip_qkv
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
