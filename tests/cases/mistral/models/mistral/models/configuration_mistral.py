from transformers.configuration_utils import PretrainedConfig


class MistralConfig(PretrainedConfig):
    r"""Configuration of a Mistral decoder.

    Args:
        sliding_window (`int`, *optional*, defaults to 4096):
            Sliding window attention window size. `None` means full attention.
    """

    model_type = "mistral"

    def __init__(
        self,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_act="silu",
        max_position_embeddings=4096 * 32,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.sliding_window = sliding_window
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)
