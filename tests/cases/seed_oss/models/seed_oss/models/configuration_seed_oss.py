# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class SeedConfig(PretrainedConfig):

    model_type = "seed_oss"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size=155136,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        max_position_embeddings=524288,
        rms_norm_eps=1e-6,
        rope_theta=10000000.0,
        rope_scaling=None,
        attention_bias=True,
        attention_out_bias=False,
        attention_dropout=0.1,
        residual_dropout=0.1,
        mlp_bias=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
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
        rope_parameters = kwargs.pop("rope_parameters", None) or rope_scaling or {}
        if rope_parameters.get("rope_type", "default") != "default":
            raise ValueError("rope scaling is not ported")
        self.rope_theta = rope_parameters.get("rope_theta", rope_theta)
        self.attention_bias = attention_bias
        self.attention_out_bias = attention_out_bias
        self.attention_dropout = attention_dropout
        self.residual_dropout = residual_dropout
        self.mlp_bias = mlp_bias
        self.head_dim = head_dim if head_dim is not None else self.hidden_size // self.num_attention_heads
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
