"""GPT-NeoX / Pythia configuration"""
from transformers import PretrainedConfig


class NeoXConfig(PretrainedConfig):
    model_type = 'gpt_neox'

    def __init__(self, vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64,
                 intermediate_size=24576, hidden_act='gelu', rotary_pct=0.25, rotary_emb_base=10000,
                 max_position_embeddings=2048, layer_norm_eps=1e-5, use_parallel_residual=True,
                 attention_bias=True, tie_word_embeddings=False, **kwargs):
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.rotary_pct = rotary_pct
        self.rotary_emb_base = rotary_emb_base
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.use_parallel_residual = use_parallel_residual
        self.attention_bias = attention_bias
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError('hidden_size must be divisible by num_attention_heads')
