"""A small Llama-like model with the interface of a standalone runner."""

from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from .configuration_skel import SkelConfig


@dataclass
class CausalOutput:
    logits: torch.Tensor


class SkelRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.eps)[0]


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class SkelRotaryEmbedding(nn.Module):
    def __init__(self, config: SkelConfig):
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponent), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class SkelAttention(nn.Module):
    def __init__(self, config: SkelConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: Optional[torch.Tensor] = None,
        past_key_value: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        kv_len: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
    ):
        bsz, q_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim)

        # rotary embedding on [B, S, N, D]
        cos, sin = cos_sin
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        query_states = query_states * cos + rotate_half(query_states) * sin
        key_states = key_states * cos + rotate_half(key_states) * sin

        # cache [B, max_seq_len, N * D]
        past_key, past_value = past_key_value
        torch_npu.scatter_update_(past_key, kv_len, key_states.flatten(2), 1)
        torch_npu.scatter_update_(past_value, kv_len, value_states.flatten(2), 1)
        if not is_prefill:
            used = int(kv_len.max()) + 1
            key_states = past_key[:, :used].view(bsz, used, self.num_key_value_heads, self.head_dim)
            value_states = past_value[:, :used].view(bsz, used, self.num_key_value_heads, self.head_dim)
        keys = key_states.transpose(1, 2).repeat_interleave(self.num_key_value_groups, dim=1)
        values = value_states.transpose(1, 2).repeat_interleave(self.num_key_value_groups, dim=1)
        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2),
            keys,
            values,
            attn_mask=~attention_mask if is_prefill else None,
            scale=self.scaling,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, self.num_heads * self.head_dim)
        return self.o_proj(attn_output)


class SkelMLP(nn.Module):
    def __init__(self, config: SkelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SkelDecoderLayer(nn.Module):
    def __init__(self, config: SkelConfig, layer_idx: int):
        super().__init__()
        self.self_attn = SkelAttention(config, layer_idx)
        self.mlp = SkelMLP(config)
        self.input_layernorm = SkelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = SkelRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, attention_mask, past_key_value, kv_len, is_prefill):
        residual = hidden_states
        hidden_states = self.self_attn(
            self.input_layernorm(hidden_states),
            cos_sin,
            attention_mask,
            past_key_value,
            kv_len,
            is_prefill,
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SkelModel(nn.Module):
    def __init__(self, config: SkelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([SkelDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = SkelRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = SkelRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, past_key_values, kv_len, attention_mask, is_prefill):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states, cos_sin, attention_mask, past_key_values[layer_idx], kv_len, is_prefill
            )
        return self.norm(hidden_states)


class SkelForCausalLM(nn.Module):
    def __init__(self, config: SkelConfig):
        super().__init__()
        self.config = config
        self.model = SkelModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[List[Tuple[torch.Tensor, torch.Tensor]]] = None,
        kv_len: Optional[torch.Tensor] = None,
        attention_mask: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
    ):
        hidden_states = self.model(input_ids, position_ids, past_key_values, kv_len, attention_mask, is_prefill)
        return CausalOutput(logits=self.lm_head(hidden_states).float())
