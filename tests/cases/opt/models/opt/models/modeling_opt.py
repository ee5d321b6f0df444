# OPT decoder for the NPU executor.
# (this file is indented with tabs, like the training code base it came from)

from typing import Iterable, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_opt import OPTLikeConfig


class LearnedPositionalEmbedding(nn.Embedding):
	"""Absolute positions; the first two rows belong to padding."""

	OFFSET = 2

	def __init__(self, num_embeddings: int, embedding_dim: int):
		super().__init__(num_embeddings + self.OFFSET, embedding_dim)

	def forward(self, position_ids: torch.LongTensor):
		return super().forward(position_ids + self.OFFSET)


class DecoderSelfAttention(nn.Module):
	def __init__(self, config: OPTLikeConfig, infer_config: InferenceConfig, layer_idx: int):
		super().__init__()
		self.layer_idx = layer_idx
		self.embed_dim = config.hidden_size
		self.num_heads = config.num_attention_heads // infer_config.parallel_config.attn_tp_size
		self.head_dim = config.hidden_size // config.num_attention_heads
		self.scaling = self.head_dim ** -0.5

		self.k_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=config.enable_bias)
		self.v_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=config.enable_bias)
		self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=config.enable_bias)
		self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=config.enable_bias)

		self.k_cache = torch.Tensor([])
		self.v_cache = torch.Tensor([])
		self.cache_unit = (self.num_heads * self.head_dim,)

	def _shape(self, tensor: torch.Tensor, bsz: int):
		return tensor.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)

	def forward(self, hidden_states, attention_mask=None, kv_len=None, is_prefill=True):
		"""Input shape: Batch x Time x Channel"""
		bsz, tgt_len, _ = hidden_states.size()

		# The query is scaled here and not in the attention call, to keep the
		# rounding of the original implementation.
		query_states = self.q_proj(hidden_states) * self.scaling
		key_states = self.k_proj(hidden_states)
		value_states = self.v_proj(hidden_states)

		if not (self.k_cache.numel() and self.v_cache.numel()):
			raise RuntimeError("kv cache of layer %d is not allocated" % self.layer_idx)

		if is_prefill:
			self.k_cache[:bsz, :tgt_len] = key_states
			self.v_cache[:bsz, :tgt_len] = value_states
		else:
			rows = torch.arange(bsz, device=hidden_states.device)
			self.k_cache[rows, kv_len] = key_states[:, 0]
			self.v_cache[rows, kv_len] = value_states[:, 0]
			# all rows have the same length
			end = int(kv_len.max()) + 1
			key_states = self.k_cache[:, :end]
			value_states = self.v_cache[:, :end]

		attn_output = F.scaled_dot_product_attention(
			self._shape(query_states, bsz),
			self._shape(key_states, bsz),
			self._shape(value_states, bsz),
			attn_mask=attention_mask,
			scale=1.0,
		)
		attn_output = attn_output.transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)
		return self.out_proj(attn_output)


class OPTDecoderLayer(nn.Module):
	def __init__(self, config: OPTLikeConfig, infer_config: InferenceConfig, layer_idx: int):
		super().__init__()
		self.self_attn = DecoderSelfAttention(config, infer_config, layer_idx)
		self.do_layer_norm_before = config.do_layer_norm_before
		self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
		self.fc1 = nn.Linear(config.hidden_size, config.ffn_dim, bias=config.enable_bias)
		self.fc2 = nn.Linear(config.ffn_dim, config.hidden_size, bias=config.enable_bias)
		self.final_layer_norm = nn.LayerNorm(config.hidden_size)

	def forward(self, hidden_states, attention_mask=None, kv_len=None, is_prefill=True):
		residual = hidden_states
		# 125m, 1.7B, ..., 175B applies layer norm BEFORE attention
		if self.do_layer_norm_before:
			hidden_states = self.self_attn_layer_norm(hidden_states)
		hidden_states = self.self_attn(
			hidden_states, attention_mask=attention_mask, kv_len=kv_len, is_prefill=is_prefill)
		hidden_states = residual + hidden_states
		# 350m applies layer norm AFTER attention
		if not self.do_layer_norm_before:
			hidden_states = self.self_attn_layer_norm(hidden_states)

		# Fully Connected
		hidden_states_shape = hidden_states.shape
		hidden_states = hidden_states.reshape(-1, hidden_states.size(-1))
		residual = hidden_states
		if self.do_layer_norm_before:
			hidden_states = self.final_layer_norm(hidden_states)
		hidden_states = self.fc2(F.relu(self.fc1(hidden_states)))
		hidden_states = (residual + hidden_states).view(hidden_states_shape)
		if not self.do_layer_norm_before:
			hidden_states = self.final_layer_norm(hidden_states)
		return hidden_states


class OPTDecoder(nn.Module):
	def __init__(self, config: OPTLikeConfig, infer_config: InferenceConfig):
		super().__init__()
		self.embed_tokens = nn.Embedding(config.vocab_size, config.word_embed_proj_dim, config.pad_token_id)
		self.embed_positions = LearnedPositionalEmbedding(config.max_position_embeddings, config.hidden_size)

		self.project_in = self.project_out = None
		if config.word_embed_proj_dim != config.hidden_size:
			self.project_out = nn.Linear(config.hidden_size, config.word_embed_proj_dim, bias=False)
			self.project_in = nn.Linear(config.word_embed_proj_dim, config.hidden_size, bias=False)

		self.final_layer_norm = None
		if config.do_layer_norm_before and not config.remove_final_layer_norm:
			self.final_layer_norm = nn.LayerNorm(config.hidden_size)

		self.layers = nn.ModuleList(
			[OPTDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])

	def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
		seq_len = input_ids.shape[1]
		inputs_embeds = self.embed_tokens(input_ids)
		if self.project_in is not None:
			inputs_embeds = self.project_in(inputs_embeds)
		hidden_states = inputs_embeds + self.embed_positions(position_ids)

		attention_mask = None
		if forward_metadata.is_prefill:
			# SDPA: True = may look at
			attention_mask = torch.ones((seq_len, seq_len), dtype=torch.bool, device=input_ids.device).tril()

		for layer in self.layers:
			hidden_states = layer(
				hidden_states,
				attention_mask=attention_mask,
				kv_len=forward_metadata.kv_len,
				is_prefill=forward_metadata.is_prefill,
			)

		if self.final_layer_norm is not None:
			hidden_states = self.final_layer_norm(hidden_states)
		if self.project_out is not None:
			hidden_states = self.project_out(hidden_states)
		return hidden_states


class OPTModel(nn.Module):
	def __init__(self, config: OPTLikeConfig, infer_config: InferenceConfig):
		super().__init__()
		self.decoder = OPTDecoder(config, infer_config)


class OPTForCausalLM(nn.Module):
	def __init__(
		self,
		config: OPTLikeConfig,
		infer_config: InferenceConfig,
		comm_manager: Optional[CommManager] = None,
		prefix: str = "",
	):
		super().__init__()
		self.config = config
		self.model = OPTModel(config, infer_config)
		# the head is tied to the embedding and keeps its own copy here
		self.lm_head = nn.Linear(config.word_embed_proj_dim, config.vocab_size, bias=False)

	def forward(
		self,
		input_ids: torch.LongTensor,
		position_ids: Optional[torch.LongTensor] = None,
		forward_metadata: ForwardMetaData = None,
		**kwargs,
	):
		bsz = forward_metadata.actual_seq_lengths_q.shape[0]
		hidden_states = self.model.decoder(
			input_ids.view(bsz, -1),
			position_ids.view(bsz, -1),
			forward_metadata,
		)

		if forward_metadata.is_prefill:
			hidden_size = hidden_states.shape[-1]
			lengths = position_ids.view(bsz, -1).max(dim=1).values + 1
			last = torch.cumsum(lengths, 0) - 1
			hidden_states = torch.index_select(hidden_states.view(-1, hidden_size), 0, last)
			hidden_states = hidden_states.view(bsz, 1, hidden_size)
		logits = self.lm_head(hidden_states)
		return logits.float()

	def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
		params_dict = dict(self.named_parameters())
		loaded = set()
		for name, weight in weights:
			# some checkpoints of the hub have no "model." in front
			if name.startswith("decoder."):
				name = "model." + name
			if name == "lm_head.weight":
				continue
			default_weight_loader(params_dict[name], weight)
			loaded.add(name)
			if name == "model.decoder.embed_tokens.weight":
				default_weight_loader(self.lm_head.weight, weight)
				loaded.add("lm_head.weight")
		return loaded
