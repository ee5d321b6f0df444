"""A small Llama-like model with the interface of a standalone runner."""

from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from .configuration_latent import LatentConfig


@dataclass
class CausalOutput:
    logits: torch.Tensor


class LatentRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.eps)[0]


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(x, cos, sin):
    """Pairs stand side by side in the weights: x0 x1 | x2 x3; they are turned into halves and rotated."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return x * cos + rotate_half(x) * sin


class LatentRotaryEmbedding(nn.Module):
    def __init__(self, config: LatentConfig):
        super().__init__()
        exponent = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponent), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LatentAttention(nn.Module):
    def __init__(self, config: LatentConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = LatentRMSNorm(self.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)

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
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.qk_head_dim)
        query_nope, query_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent = self.kv_a_layernorm(latent)
        cos, sin = cos_sin
        key_rope = rotate(key_rope, cos, sin)
        query_rope = rotate(query_rope, cos.unsqueeze(2), sin.unsqueeze(2))

        # latent cache [B, max_seq_len, kv_lora_rank] and rope cache [B, max_seq_len, qk_rope_head_dim]
        past_latent, past_rope = past_key_value
        torch_npu.scatter_update_(past_latent, kv_len, latent, 1)
        torch_npu.scatter_update_(past_rope, kv_len, key_rope, 1)
        if not is_prefill:
            used = int(kv_len.max()) + 1
            latent, key_rope = past_latent[:, :used], past_rope[:, :used]
        expanded = self.kv_b_proj(latent).view(
            bsz, -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
        )
        key_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        keys = torch.cat([key_nope, key_rope.unsqueeze(2).expand(-1, -1, self.num_heads, -1)], dim=-1)
        attn_output = F.scaled_dot_product_attention(
            torch.cat([query_nope, query_rope], dim=-1).transpose(1, 2),
            keys.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=~attention_mask if is_prefill else None,
            scale=self.scaling,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, self.num_heads * self.v_head_dim)
        return self.o_proj(attn_output)


class LatentMLP(nn.Module):
    def __init__(self, config: LatentConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LatentDecoderLayer(nn.Module):
    def __init__(self, config: LatentConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LatentAttention(config, layer_idx)
        self.mlp = LatentMLP(config)
        self.input_layernorm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)

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


class LatentModel(nn.Module):
    def __init__(self, config: LatentConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LatentDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LatentRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, past_key_values, kv_len, attention_mask, is_prefill):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            hidden_states = layer(
                hidden_states, cos_sin, attention_mask, past_key_values[layer_idx], kv_len, is_prefill
            )
        return self.norm(hidden_states)


class LatentForCausalLM(nn.Module):
    def __init__(self, config: LatentConfig):
        super().__init__()
        self.config = config
        self.model = LatentModel(config)
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
