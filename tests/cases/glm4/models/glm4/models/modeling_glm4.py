# coding=utf-8
# Adapted from the Hugging Face GLM-4-0414 implementation (Apache-2.0).
"""GLM-4 dense decoder.

Tokens stay packed ([TotalTokens, hidden]) everywhere except inside Glm4Attention, whose KV cache has a batch axis.
"""
from typing import Iterable, Optional, Set, Tuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_glm4 import Glm4Config


class Glm4RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, tokens):
        dtype = tokens.dtype
        tokens = tokens.float()
        scale = torch.rsqrt(tokens.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (tokens * scale).to(dtype)


class Glm4MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, tokens):
        gate, up = self.gate_up_proj(tokens).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class Glm4RotaryEmbedding(nn.Module):
    def __init__(self, config: Glm4Config):
        super().__init__()
        dim = int(config.head_dim * config.partial_rotary_factor)
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids, dtype):
        # packed positions [T] -> [T, rotary_dim], neighbouring dims share an angle
        angles = torch.outer(position_ids.float(), self.inv_freq).repeat_interleave(2, dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_pairs(x):
    """(x0, x1, x2, x3, ...) -> (-x1, x0, -x3, x2, ...)"""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def apply_rotary(x, cos, sin):
    """x: [B, S, N, D]; cos/sin: [B, S, 1, rotary_dim]. The tail of each head is passed through."""
    rotary_dim = cos.shape[-1]
    x_rot, x_pass = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat([x_rot * cos + rotate_pairs(x_rot) * sin, x_pass], dim=-1)


class Glm4Attention(nn.Module):
    def __init__(self, config: Glm4Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        tp_size = infer_config.parallel_config.attn_tp_size
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // tp_size, 1)
        self.scaling = self.head_dim**-0.5

        q_size = self.num_heads_per_rank * self.head_dim
        kv_size = self.num_kv_heads_per_rank * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

        self.k_cache = torch.Tensor()
        self.v_cache = torch.Tensor()
        self.cache_unit = (self.num_kv_heads_per_rank, self.head_dim)

    def _sdpa(self, query, key, value, **mask_args):
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            scale=self.scaling,
            enable_gqa=True,
            **mask_args,
        )
        return out.transpose(1, 2)

    def prefill_attention(self, query, key, value):
        """Fresh K/V only; rows of one batch have the same length."""
        return self._sdpa(query, key, value, is_causal=True)

    def decode_attention(self, query, k_cache, v_cache, kv_len):
        total = int(kv_len.max()) + 1
        visible = torch.arange(total, device=kv_len.device) <= kv_len[:, None]
        return self._sdpa(query, k_cache[:, :total], v_cache[:, :total], attn_mask=visible[:, None, None])

    def forward(self, tokens, cos, sin, forward_metadata: ForwardMetaData):
        # packed -> BSND, only here
        batch = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = tokens.view(batch, -1, self.hidden_size)
        q_len = hidden_states.shape[1]
        cos = cos.view(batch, q_len, 1, -1)
        sin = sin.view(batch, q_len, 1, -1)

        query = self.q_proj(hidden_states).view(batch, q_len, self.num_heads_per_rank, self.head_dim)
        key = self.k_proj(hidden_states).view(batch, q_len, self.num_kv_heads_per_rank, self.head_dim)
        value = self.v_proj(hidden_states).view(batch, q_len, self.num_kv_heads_per_rank, self.head_dim)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

        k_cache, v_cache = self.k_cache, self.v_cache
        if forward_metadata.is_prefill:
            kv_len = torch.zeros(batch, dtype=torch.long, device=tokens.device)
        else:
            kv_len = forward_metadata.kv_len
        torch_npu.scatter_update_(k_cache, kv_len, key, 1)
        torch_npu.scatter_update_(v_cache, kv_len, value, 1)

        if forward_metadata.is_prefill:
            attn_output = self.prefill_attention(query, key, value)
        else:
            attn_output = self.decode_attention(query, k_cache, v_cache, kv_len)

        attn_output = attn_output.reshape(batch * q_len, -1)  # packed again
        return self.o_proj(attn_output)


class Glm4DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = Glm4Attention(config, infer_config, layer_idx)
        self.mlp = Glm4MLP(config)
        self.input_layernorm = Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_self_attn_layernorm = Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_mlp_layernorm = Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens, cos, sin, forward_metadata):
        residual = tokens
        tokens = self.self_attn(self.input_layernorm(tokens), cos, sin, forward_metadata)
        tokens = residual + self.post_self_attn_layernorm(tokens)

        residual = tokens
        tokens = self.mlp(self.post_attention_layernorm(tokens))
        return residual + self.post_mlp_layernorm(tokens)


class Glm4Model(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [Glm4DecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Glm4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Glm4RotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata):
        tokens = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(position_ids, tokens.dtype)
        for decoder_layer in self.layers:
            tokens = decoder_layer(tokens, cos, sin, forward_metadata)
        return self.norm(tokens)


class Glm4ForCausalLM(nn.Module):
    def __init__(
        self,
        config: Glm4Config,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Glm4Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        slot_mapping=None,
        block_table=None,
        **kwargs,
    ) -> torch.Tensor:
        tokens = self.model(input_ids, position_ids, forward_metadata)
        if forward_metadata.is_prefill:
            tokens = tokens.index_select(0, forward_metadata.actual_seq_lengths_cu_q - 1)
        logits = self.lm_head(tokens)
        return logits.view(-1, 1, self.config.vocab_size).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, weight in weights:
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], weight)
            loaded_params.add(name)
        return loaded_params
