# -*- coding: utf-8 -*-
"""Apertus for the Ascend executor (contiguous cache, einsum attention)."""
from __future__ import annotations

import math

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader

from .configuration_apertus import ApertusConfig


def rearrange(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """The few patterns that this file needs."""
    if pattern == "b s (n d) -> b s n d":
        return x.reshape(x.shape[0], x.shape[1], sizes["n"], sizes["d"])
    if pattern == "b s n d -> b s (n d)":
        return x.reshape(x.shape[0], x.shape[1], -1)
    if pattern == "b s (k g) d -> b k g s d":
        return x.reshape(x.shape[0], x.shape[1], sizes["k"], -1, x.shape[-1]).permute(0, 2, 3, 1, 4)
    if pattern == "b k g s d -> b s (k g d)":
        return x.permute(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1)
    raise ValueError(pattern)


class XIELU(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha_p = nn.Parameter(torch.zeros(1))
        self.alpha_n = nn.Parameter(torch.zeros(1))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-6))

    def forward(self, x):
        alpha_p = nn.functional.softplus(self.alpha_p)
        alpha_n = self.beta + nn.functional.softplus(self.alpha_n)
        negative = (torch.expm1(torch.min(x, self.eps)) - x) * alpha_n + self.beta * x
        return torch.where(x > 0, alpha_p * x * x + self.beta * x, negative)


class ApertusRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]


class ApertusRotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        self.register_buffer("inv_freq", 1.0 / config.theta ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, positions):
        angles = torch.einsum("bs,f->bsf", positions.float(), self.inv_freq)
        angles = torch.cat([angles, angles], -1)[:, :, None]
        return angles.cos(), angles.sin()

    @staticmethod
    def apply(x, cos, sin):
        lo, hi = torch.tensor_split(x, 2, dim=-1)
        return x * cos + torch.cat([-hi, lo], -1) * sin


class ApertusAttention(nn.Module):
    def __init__(self, config: ApertusConfig, infer_config: InferenceConfig, layer_idx: int, **_):
        super().__init__()
        parallel = infer_config.parallel_config
        self.layer_idx = layer_idx
        self.d = config.hidden_size // config.num_attention_heads
        self.n = config.num_attention_heads // parallel.attn_tp_size
        self.k = max(config.num_key_value_heads // parallel.attn_tp_size, 1)
        self.q_proj = nn.Linear(config.hidden_size, self.n * self.d, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.k * self.d, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.k * self.d, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.n * self.d, config.hidden_size, bias=config.attention_bias)
        self.q_norm = ApertusRMSNorm(self.d, config.rms_norm_eps)
        self.k_norm = ApertusRMSNorm(self.d, config.rms_norm_eps)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.d * self.k,)

    def _softmax_qk_v(self, q, k, v, hidden):
        """q [B, S, N, D], k and v [B, T, K, D], hidden: keys that are not seen"""
        q = rearrange(q, "b s (k g) d -> b k g s d", k=self.k)
        scores = torch.einsum("bkgsd,btkd->bkgst", q, k) / math.sqrt(self.d)
        scores = scores.masked_fill(hidden, float("-inf"))
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        return rearrange(torch.einsum("bkgst,btkd->bkgsd", probs, v), "b k g s d -> b s (k g d)")

    def _prefill(self, q, k, v, *, forward_metadata, **_):
        s = q.shape[1]
        return self._softmax_qk_v(q, k, v, forward_metadata.attention_mask[:s, :s])

    def _decode(self, q, *, forward_metadata, **_):
        lengths = forward_metadata.actual_seq_lengths_kv
        beyond = torch.arange(self.k_cache.size(1), device=q.device)[None, :] >= lengths[:, None]
        k, v = (
            rearrange(c.masked_fill(beyond[..., None], 0), "b s (n d) -> b s n d", n=self.k, d=self.d)
            for c in (self.k_cache, self.v_cache)
        )
        return self._softmax_qk_v(q, k, v, beyond[:, None, None, None])

    def forward(self, hidden_states, **kwargs):
        meta, (cos, sin) = kwargs["forward_metadata"], kwargs["rope"]
        q = rearrange(self.q_proj(hidden_states), "b s (n d) -> b s n d", n=self.n, d=self.d)
        k = rearrange(self.k_proj(hidden_states), "b s (n d) -> b s n d", n=self.k, d=self.d)
        v = rearrange(self.v_proj(hidden_states), "b s (n d) -> b s n d", n=self.k, d=self.d)
        q, k = ApertusRotary.apply(self.q_norm(q), cos, sin), ApertusRotary.apply(self.k_norm(k), cos, sin)
        torch_npu.scatter_update_(self.k_cache, kwargs["write_at"], rearrange(k, "b s n d -> b s (n d)"), 1)
        torch_npu.scatter_update_(self.v_cache, kwargs["write_at"], rearrange(v, "b s n d -> b s (n d)"), 1)
        mixed = self._prefill(q, k, v, **kwargs) if meta.is_prefill else self._decode(q, **kwargs)
        return self.o_proj(mixed)


class ApertusMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = XIELU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)))


class ApertusLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = ApertusAttention(config, infer_config, layer_idx)
        self.mlp = ApertusMLP(config)
        self.attention_layernorm = ApertusRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feedforward_layernorm = ApertusRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.attention_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.feedforward_layernorm(hidden_states))


class ApertusModel(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            self.layers.append(ApertusLayer(config, infer_config, layer_idx))
        self.norm = ApertusRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = ApertusRotary(config)

    def forward(self, input_ids, position_ids, **kwargs):
        meta = kwargs["forward_metadata"]
        write_at = torch.zeros_like(meta.actual_seq_lengths_kv) if meta.is_prefill else meta.kv_len
        kwargs.update(rope=self.rotary_emb(position_ids), write_at=write_at)
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return self.norm(hidden_states)


class ApertusForCausalLM(nn.Module):
    def __init__(self, config: ApertusConfig, infer_config: InferenceConfig, comm_manager: CommManager | None = None,
                 prefix: str = ""):
        super().__init__()
        self.infer_config = infer_config
        self.model = ApertusModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, **kwargs):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        out = self.model(input_ids.view(rows, -1), position_ids.view(rows, -1), **kwargs)
        if kwargs["forward_metadata"].is_prefill:
            out = out[torch.arange(rows, device=out.device), kwargs["forward_metadata"].actual_seq_lengths_q - 1][:, None]
        return self.lm_head(out).float()

    def load_weights(self, weights):
        slots = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            default_weight_loader(slots[name], tensor)
        return set(dict(self.named_parameters()))
