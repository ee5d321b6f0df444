# coding=utf-8
"""Arcee AFM-4.5B. Tokens stay packed; only attention works on a padded batch."""
import math
from typing import Iterable, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_arcee import AFMConfig


class PadInfo(NamedTuple):
    """Where each packed token sits in the padded batch."""

    batch: int
    max_len: int
    flat_idx: torch.Tensor  # [T] row * max_len + column

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        out = packed.new_zeros((self.batch * self.max_len, *packed.shape[1:]))
        out.index_copy_(0, self.flat_idx, packed)
        return out.view(self.batch, self.max_len, *packed.shape[1:])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.flatten(0, 1).index_select(0, self.flat_idx)


def make_pad_info(forward_metadata: ForwardMetaData, num_tokens: int) -> PadInfo:
    lengths = forward_metadata.actual_seq_lengths_q
    ends = forward_metadata.actual_seq_lengths_cu_q
    token = torch.arange(num_tokens, device=ends.device)
    row = torch.bucketize(token, ends, right=True)
    column = token - (ends - lengths)[row]
    max_len = int(lengths.max())
    return PadInfo(lengths.shape[0], max_len, row * max_len + column)


class AFMRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(dtype)


class AFMRotaryEmbedding(nn.Module):
    def __init__(self, config: AFMConfig):
        super().__init__()
        rope, dim = config.rope, config.head_dim
        base = rope["rope_theta"]
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        self.attention_scaling = 1.0
        if rope.get("rope_type") == "yarn":
            factor, old_len = rope["factor"], rope["original_max_position_embeddings"]

            def correction(rotations):
                return dim * math.log(old_len / (rotations * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(correction(rope.get("beta_fast") or 32)), 0)
            high = min(math.ceil(correction(rope.get("beta_slow") or 1)), dim - 1)
            ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / max(high - low, 0.001)).clamp(0, 1)
            inv_freq = inv_freq / factor * ramp + inv_freq * (1 - ramp)
            self.attention_scaling = 0.1 * math.log(factor) + 1.0
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, position_ids, dtype):
        """[T] -> [T, 1, D]"""
        freqs = position_ids[:, None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)[:, None]
        return (emb.cos() * self.attention_scaling).to(dtype), (emb.sin() * self.attention_scaling).to(dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class AFMAttention(nn.Module):
    def __init__(self, config: AFMConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // attn_tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // attn_tp_size, 1)
        self.scaling = self.head_dim**-0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=bias)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads_per_rank, self.head_dim)

    def _slots(self, forward_metadata: ForwardMetaData) -> torch.Tensor:
        """Row of each token in the flattened cache [B * S, N, D]."""
        if forward_metadata.is_prefill:
            return forward_metadata.kv_len  # flat already
        kv_len = forward_metadata.kv_len
        return torch.arange(kv_len.shape[0], device=kv_len.device) * self.k_cache.shape[1] + kv_len

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        pad_info: PadInfo,
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        num_tokens = hidden_states.shape[0]
        query = self.q_proj(hidden_states).view(num_tokens, self.num_heads_per_rank, self.head_dim)
        key = self.k_proj(hidden_states).view(num_tokens, self.num_key_value_heads_per_rank, self.head_dim)
        value = self.v_proj(hidden_states).view(num_tokens, self.num_key_value_heads_per_rank, self.head_dim)

        cos, sin = position_embeddings
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        slots = self._slots(forward_metadata)
        self.k_cache.view(-1, *self.cache_unit).index_copy_(0, slots, key)
        self.v_cache.view(-1, *self.cache_unit).index_copy_(0, slots, value)

        query = pad_info.pad(query).transpose(1, 2)
        if forward_metadata.is_prefill:
            # padding is on the right, so causal order hides it from real tokens
            key = pad_info.pad(key).transpose(1, 2)
            value = pad_info.pad(value).transpose(1, 2)
            visible = None
        else:
            written = torch.arange(self.k_cache.shape[1], device=query.device) <= forward_metadata.kv_len[:, None]
            fresh = written[:, :, None, None]
            key = self.k_cache.masked_fill(~fresh, 0).transpose(1, 2)
            value = self.v_cache.masked_fill(~fresh, 0).transpose(1, 2)
            visible = written[:, None, None]

        attn_output = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=visible, is_causal=visible is None, scale=self.scaling, enable_gqa=True,
        )
        attn_output = pad_info.unpad(attn_output.transpose(1, 2))
        return self.o_proj(attn_output.reshape(num_tokens, -1))


class AFMMLP(nn.Module):
    def __init__(self, config: AFMConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(torch.square(F.relu(self.up_proj(x))))


class AFMDecoderLayer(nn.Module):
    def __init__(self, config: AFMConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = AFMAttention(config, infer_config, layer_idx)
        self.mlp = AFMMLP(config)
        self.input_layernorm = AFMRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = AFMRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, pad_info, forward_metadata):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, position_embeddings, pad_info, forward_metadata)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states


class AFMModel(nn.Module):
    def __init__(self, config: AFMConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [AFMDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = AFMRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = AFMRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        pad_info = make_pad_info(forward_metadata, input_ids.shape[0])
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, pad_info, forward_metadata)
        return self.norm(hidden_states)


class AFMForCausalLM(nn.Module):
    def __init__(
        self,
        config: AFMConfig,
        infer_config: InferenceConfig,
        comm_manager: Optional[CommManager] = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.model = AFMModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = self.model(input_ids, position_ids, forward_metadata)
        if forward_metadata.is_prefill:
            hidden_states = torch.index_select(hidden_states, 0, forward_metadata.actual_seq_lengths_cu_q - 1)
        return self.lm_head(hidden_states.unsqueeze(1)).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            default_weight_loader(params_dict[name], tensor)
            loaded.add(name)
        return loaded
