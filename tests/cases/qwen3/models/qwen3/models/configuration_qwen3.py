# coding=utf-8
from transformers.configuration_utils import PretrainedConfig


class Qwen3Config(PretrainedConfig):
    model_type = 'qwen3'

    def __init__(self,
                 vocab_size=151936,
                 hidden_size=4096,
                 intermediate_size=22016,
                 num_hidden_layers=32,
                 num_attention_heads=32,
                 num_key_value_heads=32,
                 head_dim=128,
                 hidden_act='silu',
                 max_position_embeddings=32768,
                 rms_norm_eps=1e-6,
                 tie_word_embeddings=False,
                 rope_theta=10000.0,
                 attention_bias=False,
                 use_sliding_window=False,
                 sliding_window=4096,
                 max_window_layers=28,
                 **kwargs):
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
        self.tie_word_embeddings = tie_word_embeddings
        self.rope_theta = rope_theta
        self.attention_bias = attention_bias
        # 滑窗在该系列 dense 模型上默认关闭，use_sliding_window=False 时 sliding_window 不生效
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window if use_sliding_window else None
        self.max_window_layers = max_window_layers
        super().__init__(**kwargs)
