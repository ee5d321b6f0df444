"""InternLM3 configuration, the keys that inference needs."""
from transformers import PretrainedConfig


class InternLM3Config(PretrainedConfig):
    model_type = "internlm3"

    def __init__(self, vocab_size=128512, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=2, head_dim=None, hidden_act="silu",
                 max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=10000.0, qkv_bias=False, bias=False,
                 **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_base = rope_theta
        self.qkv_bias = qkv_bias
        self.bias = bias
        super().__init__(**kwargs)
