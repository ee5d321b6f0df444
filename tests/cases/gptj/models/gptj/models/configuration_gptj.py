from transformers import PretrainedConfig


class GPTJConfig(PretrainedConfig):
    model_type = "gptj"
    attribute_map = {
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(self, vocab_size=50400, n_positions=2048, n_embd=4096, n_layer=28, n_head=16, rotary_dim=64,
                 n_inner=None, layer_norm_epsilon=1e-5, activation_function="gelu_new", **kwargs):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.rotary_dim = rotary_dim
        self.n_inner = n_inner
        self.layer_norm_epsilon = layer_norm_epsilon
        self.activation_function = activation_function
        super().__init__(**kwargs)
