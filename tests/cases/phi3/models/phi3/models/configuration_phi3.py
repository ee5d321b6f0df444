# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class Phi3Config(PretrainedConfig):
    model_type = 'phi3'

    def __init__(self, vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=None, resid_pdrop=0.0, embd_pdrop=0.0,
                 hidden_act='silu', max_position_embeddings=4096, original_max_position_embeddings=4096,
                 rms_norm_eps=1e-5, rope_theta=10000.0, pad_token_id=32000, sliding_window=None,
                 tie_word_embeddings=False, **kwargs):
        if kwargs.get('rope_scaling') is not None:
            raise ValueError('only checkpoints without rope_scaling are supported')
        kwargs.pop('rope_scaling', None)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.resid_pdrop = resid_pdrop
        self.embd_pdrop = embd_pdrop
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.original_max_position_embeddings = original_max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.pad_token_id = pad_token_id
        self.sliding_window = sliding_window
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)
