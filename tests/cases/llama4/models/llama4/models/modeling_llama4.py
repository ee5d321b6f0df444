# coding=utf-8
"""Llama 4 (text). Rotary layers attend within chunks of attention_chunk_size tokens, every 4th layer globally."""
from typing import Dict, Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_llama4 import ScoutTextConfig


class ScoutRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def l2_norm(x, eps):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return normed.type_as(x)


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x_ * freqs_cis[:, :, None, :]).flatten(3).type_as(x)


class ScoutMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ScoutExperts(nn.Module):
    def __init__(self, config: ScoutTextConfig):
        super().__init__()
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_local_experts, config.hidden_size, 2 * config.intermediate_size))
        self.down_proj = nn.Parameter(
            torch.empty(config.num_local_experts, config.intermediate_size, config.hidden_size))

    def forward(self, x):
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * F.silu(gate), self.down_proj)


class ScoutMoe(nn.Module):
    def __init__(self, config: ScoutTextConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.hidden_dim = config.hidden_size
        self.num_experts = config.num_local_experts
        self.experts = ScoutExperts(config)
        self.router = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.shared_expert = ScoutMLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = self.router(hidden_states)
        top_value, top_index = torch.topk(router_logits, self.top_k, dim=1)
        scores = torch.full_like(router_logits, float("-inf")).scatter_(1, top_index, top_value)
        scores = torch.sigmoid(scores.float()).to(hidden_states.dtype)
        # every expert runs over every token, the unwanted ones over zeros
        routed_in = hidden_states[None] * scores.t()[:, :, None]
        out = self.shared_expert(hidden_states) + self.experts(routed_in).sum(dim=0)
        return out.view(shape)


class ScoutAttention(nn.Module):
    def __init__(self, config: ScoutTextConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        tp = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // tp
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // tp, 1)
        self.scaling = self.head_dim ** -0.5
        self.use_rope = config.no_rope_layers[layer_idx]
        self.use_qk_norm = config.use_qk_norm and self.use_rope
        self.qk_norm_eps = config.rms_norm_eps
        self.attn_temperature_tuning = config.attn_temperature_tuning and not self.use_rope
        self.floor_scale = config.floor_scale
        self.attn_scale = config.attn_scale
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads_per_rank * self.head_dim,)

    def forward(self, hidden_states, freqs_cis, position_ids, attention_mask, kv_len, total_len):
        bsz, q_len, _ = hidden_states.shape
        query_states = self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)
        value_states = self.v_proj(hidden_states)

        if self.use_rope:
            query_states = apply_rotary_emb(query_states, freqs_cis)
            key_states = apply_rotary_emb(key_states, freqs_cis)
        if self.use_qk_norm:
            query_states = l2_norm(query_states, self.qk_norm_eps)
            key_states = l2_norm(key_states, self.qk_norm_eps)
        if self.attn_temperature_tuning:
            steps = torch.floor((position_ids.float() + 1.0) / self.floor_scale)
            attn_scales = torch.log1p(steps) * self.attn_scale + 1.0
            query_states = (query_states * attn_scales[:, :, None, None]).to(query_states.dtype)

        torch_npu.scatter_update_(self.k_cache, kv_len, key_states.flatten(2), -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states, -2)

        keys = self.k_cache[:, :total_len].view(bsz, total_len, -1, self.head_dim).transpose(1, 2)
        values = self.v_cache[:, :total_len].view(bsz, total_len, -1, self.head_dim).transpose(1, 2)
        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2), keys, values, attn_mask=attention_mask, scale=self.scaling, enable_gqa=True)
        return self.o_proj(attn_output.transpose(1, 2).reshape(bsz, q_len, -1))


class ScoutDecoderLayer(nn.Module):
    def __init__(self, config: ScoutTextConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = ScoutAttention(config, infer_config, layer_idx)
        if (layer_idx + 1) % config.interleave_moe_layer_step == 0:
            self.feed_forward = ScoutMoe(config)
        else:
            self.feed_forward = ScoutMLP(config.hidden_size, config.intermediate_size_mlp)
        self.input_layernorm = ScoutRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = ScoutRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.feed_forward(self.post_attention_layernorm(hidden_states))


class ScoutModel(nn.Module):
    def __init__(self, config: ScoutTextConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [ScoutDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = ScoutRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta ** exponent), persistent=False)

    def _masks(self, position_ids, total_len) -> Dict[str, torch.Tensor]:
        """Bool, True = visible, [B, 1, q, kv]"""
        kv_pos = torch.arange(total_len, device=position_ids.device)
        q_pos = position_ids[:, None, :, None]
        causal = kv_pos <= q_pos
        chunk = self.config.attention_chunk_size
        return {
            "full_attention": causal,
            "chunked_attention": causal & (kv_pos // chunk == q_pos // chunk),
        }

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        if forward_metadata.is_prefill:
            kv_len, total_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device), q_len
        else:
            kv_len, total_len = forward_metadata.kv_len, int(forward_metadata.kv_len.max()) + 1
        hidden_states = self.embed_tokens(input_ids)
        freqs = position_ids[..., None].float() * self.inv_freq
        freqs_cis = torch.polar(torch.ones_like(freqs), freqs)
        masks = self._masks(position_ids, total_len)
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(
                hidden_states,
                freqs_cis=freqs_cis,
                position_ids=position_ids,
                attention_mask=masks[layer_type],
                kv_len=kv_len,
                total_len=total_len,
            )
        return self.norm(hidden_states)


class Llama4ForCausalLM(nn.Module):
    def __init__(self, config: ScoutTextConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = ScoutModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            name = name.removeprefix("language_model.")  # checkpoints with the vision tower
            if name.startswith(("vision_model.", "multi_modal_projector.")):
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
