from transformers import PretrainedConfig


class BitNetConfig(PretrainedConfig):
    model_type = "bitnet"

    def __init__(self, vocab_size=128256, hidden_size=2560, intermediate_size=6912, num_hidden_layers=30,
                 num_attention_heads=20, num_key_value_heads=5, hidden_act="relu2", max_position_embeddings=2048,
                 rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=False, **kwargs):
        for key, value in locals().copy().items():
            if key not in ("self", "kwargs", "__class__"):
                setattr(self, key, value)
        super().__init__(**kwargs)
