from transformers.configuration_utils import PretrainedConfig


class BigScienceConfig(PretrainedConfig):
    model_type = "bloom"
    attribute_map = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}

    def __init__(self, vocab_size=250880, hidden_size=64, n_layer=2, n_head=8, layer_norm_epsilon=1e-5,
                 apply_residual_connection_post_layernorm=False, bos_token_id=1, eos_token_id=2, **kwargs):
        self.vocab_size = vocab_size
        # hub files say n_embed
        self.hidden_size = kwargs.pop("n_embed", None) or hidden_size
        self.n_layer = n_layer
        self.n_head = n_head
        self.layer_norm_epsilon = layer_norm_epsilon
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        super().__init__(bos_token_id=bos_token_id, eos_token_id=eos_token_id, **kwargs)
