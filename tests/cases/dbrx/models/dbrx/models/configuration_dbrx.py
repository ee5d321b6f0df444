from transformers import PretrainedConfig


class DbrxConfig(PretrainedConfig):
    model_type = "dbrx"
    attribute_map = {
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }

    def __init__(self, d_model=2048, n_heads=16, n_layers=24, max_seq_len=2048, vocab_size=32000, attn_config=None,
                 ffn_config=None, **kwargs):
        self.d_model = d_model
        self.n_heads = n_heads
        self.n_layers = n_layers
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.attn_config = attn_config or {"kv_n_heads": 1, "clip_qkv": None, "rope_theta": 10000.0}
        self.ffn_config = ffn_config or {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1}
        super().__init__(**kwargs)
