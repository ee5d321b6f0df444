from transformers import PretrainedConfig


class MiniCPMConfig(PretrainedConfig):
    model_type = "minicpm3"

    def __init__(self, vocab_size=73448, hidden_size=2560, intermediate_size=6400, num_hidden_layers=62,
                 num_attention_heads=40, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64,
                 qk_rope_head_dim=32, v_head_dim=64, rms_norm_eps=1e-5, rope_theta=10000.0, scale_emb=12,
                 scale_depth=1.4, dim_model_base=256, tie_word_embeddings=True, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.scale_emb = scale_emb
        self.scale_depth = scale_depth
        self.dim_model_base = dim_model_base
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
