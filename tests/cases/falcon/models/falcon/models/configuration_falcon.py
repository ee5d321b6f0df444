# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class RWConfig(PretrainedConfig):
    """RefinedWeb (Falcon) configuration."""

    model_type = "falcon"

    def __init__(
        self,
        vocab_size=65024,
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        layer_norm_epsilon=1e-5,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        alibi=False,
        new_decoder_architecture=False,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        bos_token_id=11,
        eos_token_id=11,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.layer_norm_epsilon = layer_norm_epsilon
        self.multi_query = multi_query
        self.parallel_attn = parallel_attn
        self.bias = bias
        self.max_position_embeddings = max_position_embeddings
        rope = kwargs.get("rope_parameters")
        self.rope_theta = rope["rope_theta"] if rope else rope_theta
        if alibi or new_decoder_architecture or not multi_query or not parallel_attn:
            raise ValueError("only the 7B architecture (rotary, multi-query, parallel) is ported")
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, **kwargs)

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads
