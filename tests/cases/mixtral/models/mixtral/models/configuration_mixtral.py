# coding=utf-8
""" Mixtral model configuration"""
from transformers.configuration_utils import PretrainedConfig


class MixtralConfig(PretrainedConfig):
    model_type = "mixtral"

    def __init__(self, vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=8, head_dim=None, hidden_act="silu",
                 max_position_embeddings=4096 * 32, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None,
                 num_experts_per_tok=2, num_local_experts=8, tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.sliding_window = sliding_window
        self.num_experts_per_tok = num_experts_per_tok
        self.num_local_experts = num_local_experts
        self.tie_word_embeddings = tie_word_embeddings
        # name of the function in modeling_mixtral.ATTENTION_FUNCTIONS
        self.attn_backend = kwargs.pop("attn_backend", "sdpa")
        super().__init__(**kwargs)
