from transformers.configuration_utils import PretrainedConfig


class OPTLikeConfig(PretrainedConfig):
	model_type = "opt"

	def __init__(
		self,
		vocab_size=50272,
		hidden_size=768,
		num_hidden_layers=12,
		ffn_dim=3072,
		max_position_embeddings=2048,
		do_layer_norm_before=True,
		_remove_final_layer_norm=False,
		word_embed_proj_dim=None,
		num_attention_heads=12,
		activation_function="relu",
		enable_bias=True,
		pad_token_id=1,
		bos_token_id=2,
		eos_token_id=2,
		**kwargs,
	):
		super().__init__(
			pad_token_id=pad_token_id,
			bos_token_id=bos_token_id,
			eos_token_id=eos_token_id,
			**kwargs,
		)
		self.vocab_size = vocab_size
		self.max_position_embeddings = max_position_embeddings
		self.num_attention_heads = num_attention_heads
		self.word_embed_proj_dim = word_embed_proj_dim if word_embed_proj_dim is not None else hidden_size
		self.ffn_dim = ffn_dim
		self.hidden_size = hidden_size
		self.num_hidden_layers = num_hidden_layers
		self.activation_function = activation_function
		self.do_layer_norm_before = do_layer_norm_before
		self.remove_final_layer_norm = _remove_final_layer_norm
		self.enable_bias = enable_bias
