from transformers.configuration_utils import PretrainedConfig


class NanoConfig(PretrainedConfig):
    model_type = "gemma3n_text"

    def __init__(
        self,
        vocab_size=262400,
        vocab_size_per_layer_input=262144,
        hidden_size=2048,
        hidden_size_per_layer_input=256,
        intermediate_size=16384,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        sliding_window=512,
        layer_types=None,
        final_logit_softcapping=30.0,
        altup_active_idx=0,
        altup_num_inputs=4,
        altup_correct_scale=True,
        num_kv_shared_layers=15,
        laurel_rank=64,
        activation_sparsity_pattern=None,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.vocab_size_per_layer_input = vocab_size_per_layer_input
        self.hidden_size = hidden_size
        self.hidden_size_per_layer_input = hidden_size_per_layer_input
        self.num_hidden_layers = num_hidden_layers
        if not isinstance(intermediate_size, (list, tuple)):
            intermediate_size = [intermediate_size] * num_hidden_layers
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rms_norm_eps = rms_norm_eps
        rope = kwargs.pop("rope_parameters", None) or {}
        self.rope_bases = {
            "full_attention": rope.get("full_attention", {}).get("rope_theta", rope_theta),
            "sliding_attention": rope.get("sliding_attention", {}).get("rope_theta", rope_local_base_freq),
        }
        self.sliding_window = sliding_window
        self.layer_types = layer_types or [
            "full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(num_hidden_layers)]
        self.final_logit_softcapping = final_logit_softcapping
        self.altup_active_idx = altup_active_idx
        self.altup_num_inputs = altup_num_inputs
        self.altup_correct_scale = altup_correct_scale
        self.num_kv_shared_layers = num_kv_shared_layers
        self.laurel_rank = laurel_rank
        self.activation_sparsity_pattern = activation_sparsity_pattern or [0.0] * num_hidden_layers
        super().__init__(pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id,
                         tie_word_embeddings=tie_word_embeddings, **kwargs)
