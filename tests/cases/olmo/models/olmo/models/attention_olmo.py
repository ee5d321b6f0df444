# coding=utf-8
"""Attention of the OLMo port, with its Legacy cache."""
import torch
import torch_npu
from torch import nn
from torch.nn import functional as F


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class CachedAttention(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.clip_qkv = config.clip_qkv
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        bsz, q_len, _ = hidden_states.shape
        states = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if self.clip_qkv is not None:
            states = [s.clamp(min=-self.clip_qkv, max=self.clip_qkv) for s in states]
        query, key, value = (s.view(bsz, q_len, -1, self.head_dim) for s in states)
        cos, sin = cos_sin
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        torch_npu.scatter_update_(self.k_cache, kv_len, key, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, value, 1)
        if not is_prefill:
            key, value = self.k_cache[:, :total_len], self.v_cache[:, :total_len]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            is_causal=is_prefill, scale=self.head_dim ** -0.5, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1))
