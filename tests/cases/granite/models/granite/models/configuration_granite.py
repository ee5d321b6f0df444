from transformers.configuration_utils import PretrainedConfig


class Granite3Config(PretrainedConfig):
    """Configuration of IBM Granite 3.x dense models."""

    model_type = "granite"

    def __init__(
            self,
            vocab_size=49155,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=8,
            hidden_act="silu",
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            embedding_multiplier=1.0,
            attention_multiplier=1.0,
            residual_multiplier=1.0,
            logits_scaling=1.0,
            attention_bias=False,
            mlp_bias=False,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=True,
            **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        if kwargs.get("rope_parameters"):
            self.rope_theta = kwargs["rope_parameters"]["rope_theta"]
        self.embedding_multiplier = embedding_multiplier
        self.attention_multiplier = attention_multiplier
        self.residual_multiplier = residual_multiplier
        self.logits_scaling = logits_scaling
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        super().__init__(pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id,
                         tie_word_embeddings=tie_word_embeddings, **kwargs)
