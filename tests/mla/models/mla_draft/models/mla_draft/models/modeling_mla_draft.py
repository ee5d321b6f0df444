# ruff: noqa  (framework style on purpose)
"""Latent attention with a drafting model (MTP) of the same class. Legacy KV cache: decompressed per head, eager."""
import math
import re
from typing import Iterable, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_mla_draft import DraftedConfig


class DraftedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def yarn_get_mscale(scale=1, mscale=1):
    if scale <= 1:
        return 1.0
    return 0.1 * mscale * math.log(scale) + 1.0


class DraftedYarnRotaryEmbedding(nn.Module):
    def __init__(self, config: DraftedConfig):
        super().__init__()
        dim, base, yarn = config.qk_rope_head_dim, config.rope_base, config.yarn
        freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))

        def find_dim(rotations):
            return dim * math.log(yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (
                2 * math.log(base))

        low = max(math.floor(find_dim(yarn["beta_fast"])), 0)
        high = min(math.ceil(find_dim(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / max(high - low, 0.001)).clamp(0, 1)
        inv_freq = freq / yarn["factor"] * ramp + freq * (1 - ramp)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        # cos and sin carry mscale / mscale_all_dim; the softmax scale carries mscale_all_dim squared
        self._mscale = yarn_get_mscale(yarn["factor"], yarn.get("mscale", 1)) / yarn_get_mscale(
            yarn["factor"], yarn.get("mscale_all_dim", 0))

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return (emb.cos() * self._mscale).to(x.dtype), (emb.sin() * self._mscale).to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)

    b, h, s, d = q.shape
    q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)

    b, h, s, d = k.shape
    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)

    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class DraftedMLP(nn.Module):
    def __init__(self, config: DraftedConfig, intermediate_size: int, tp_size: int, reduce_output=True):
        super().__init__()
        self.reduce_output = reduce_output and tp_size > 1
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size // tp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size // tp_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size // tp_size, config.hidden_size, bias=False)

    def forward(self, x):
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.reduce_output:
            dist.all_reduce(out)
        return out


class MoEGate(nn.Module):
    def __init__(self, config: DraftedConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.n_routed_experts = config.n_routed_experts
        self.n_group = config.n_group
        self.topk_group = config.topk_group
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(self.n_routed_experts, dtype=torch.float32))

    def forward(self, tokens):
        scores = F.linear(tokens.float(), self.weight).sigmoid()
        choice = scores + self.e_score_correction_bias
        groups = choice.view(-1, self.n_group, self.n_routed_experts // self.n_group)
        group_scores = groups.topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter_(1, group_idx, 1)
        choice = groups.masked_fill(group_mask.unsqueeze(-1) == 0, float("-inf")).flatten(1)
        topk_idx = torch.topk(choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weight = scores.gather(1, topk_idx)
        if self.norm_topk_prob:
            topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_idx, topk_weight * self.routed_scaling_factor


class DraftedMoE(nn.Module):
    def __init__(self, config: DraftedConfig, infer_config: InferenceConfig):
        super().__init__()
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.n_routed_experts = config.n_routed_experts
        self.gate = MoEGate(config)
        self.experts = nn.ModuleList([
            DraftedMLP(config, config.moe_intermediate_size, self.moe_tp_size, reduce_output=False)
            for _ in range(self.n_routed_experts)])
        self.shared_experts = DraftedMLP(
            config, config.moe_intermediate_size * config.n_shared_experts, self.moe_tp_size, reduce_output=False)

    def forward(self, hidden_states):
        shape = hidden_states.shape
        tokens = hidden_states.view(-1, shape[-1])
        topk_idx, topk_weight = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            weight = (topk_weight * (topk_idx == i)).sum(dim=-1, keepdim=True).to(tokens.dtype)
            out = out + expert(tokens) * weight
        out = (out + self.shared_experts(tokens)).view(shape)
        if self.moe_tp_size > 1:
            dist.all_reduce(out)
        return out


class DraftedAttention(nn.Module):
    def __init__(self, config: DraftedConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.v_head_dim = config.v_head_dim
        self.q_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim

        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = DraftedRMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads_per_rank * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = DraftedRMSNorm(config.kv_lora_rank)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, self.num_heads_per_rank * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.v_head_dim, config.hidden_size, bias=False)

        self.softmax_scale = self.q_head_dim ** (-0.5)
        if config.yarn.get("mscale_all_dim", 0):
            mscale = yarn_get_mscale(config.yarn["factor"], config.yarn["mscale_all_dim"])
            self.softmax_scale = self.softmax_scale * mscale * mscale

        # filled by init_cache of the model: K and V have different sizes
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def forward(self, hidden_states, cos_sin, forward_metadata: ForwardMetaData):
        bsz, q_len, _ = hidden_states.size()

        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(bsz, q_len, self.num_heads_per_rank, self.q_head_dim).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

        compressed_kv = self.kv_a_proj_with_mqa(hidden_states)
        compressed_kv, k_pe = torch.split(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = k_pe.view(bsz, q_len, 1, self.qk_rope_head_dim).transpose(1, 2)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(compressed_kv))
            .view(bsz, q_len, self.num_heads_per_rank, self.qk_nope_head_dim + self.v_head_dim)
            .transpose(1, 2)
        )
        k_nope, value_states = torch.split(kv, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)

        cos, sin = cos_sin
        q_pe, k_pe = apply_rotary_pos_emb(q_pe, k_pe, cos, sin)

        query_states = torch.cat([q_nope, q_pe], dim=-1)
        # the rope part is shared by all heads
        key_states = torch.cat([k_nope, k_pe.expand(-1, self.num_heads_per_rank, -1, -1)], dim=-1)

        if forward_metadata.is_prefill:
            start = torch.zeros(bsz, dtype=torch.int64, device=hidden_states.device)
        else:
            start = forward_metadata.kv_len
        torch_npu.scatter_update_(self.k_cache, start, key_states.transpose(1, 2), 1)
        torch_npu.scatter_update_(self.v_cache, start, value_states.transpose(1, 2), 1)

        mask = None
        if forward_metadata.is_prefill:
            mask = forward_metadata.attention_mask[:q_len, :q_len]
        else:
            # decode: one query over everything written so far
            kv_end = int(forward_metadata.actual_seq_lengths_kv.max().item())
            key_states = self.k_cache[:, :kv_end].transpose(1, 2)
            value_states = self.v_cache[:, :kv_end].transpose(1, 2)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.softmax_scale
        if mask is not None:
            attn_weights = attn_weights.masked_fill(mask, float("-inf"))
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, self.num_heads_per_rank * self.v_head_dim)

        attn_output = self.o_proj(attn_output)
        if self.attn_tp_size > 1:
            dist.all_reduce(attn_output)
        return attn_output


class DraftedDecoderLayer(nn.Module):
    def __init__(self, config: DraftedConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DraftedAttention(config, infer_config, layer_idx)
        if layer_idx >= config.first_k_dense_replace:
            self.mlp = DraftedMoE(config, infer_config)
        else:
            self.mlp = DraftedMLP(config, config.intermediate_size, infer_config.parallel_config.attn_tp_size)
        self.input_layernorm = DraftedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DraftedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, forward_metadata):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, cos_sin, forward_metadata)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states


class DraftedModel(nn.Module):
    def __init__(self, config: DraftedConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DraftedDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = DraftedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DraftedYarnRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos_sin, forward_metadata)
        return self.norm(hidden_states)


class DraftedForCausalLM(nn.Module):
    def __init__(self, config: DraftedConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.rank = dist.get_rank() if infer_config.parallel_config.world_size > 1 else 0
        self.model = DraftedModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        cache_len = (
            self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens)
        dtype = self.lm_head.weight.dtype
        for layer in (self.model.layers.values() if hasattr(self.model.layers, "values") else self.model.layers):
            attn = layer.self_attn
            attn.k_cache = torch.zeros(
                (batch_size, cache_len, attn.num_heads_per_rank, attn.q_head_dim), dtype=dtype, device=device)
            attn.v_cache = torch.zeros(
                (batch_size, cache_len, attn.num_heads_per_rank, attn.v_head_dim), dtype=dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        prev_hidden_states = hidden_states
        if forward_metadata.is_prefill:
            rows = torch.arange(bsz, device=input_ids.device)
            hidden_states = hidden_states[rows, forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return self.lm_head(hidden_states).float(), prev_hidden_states

    def _shard(self, tensor, dim, size):
        return tensor if size == 1 else tensor.chunk(size, dim=dim)[self.rank % size]

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, weight in weights:
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer and int(layer.group(1)) >= self.config.num_hidden_layers:
                continue  # MTP layer
            moe = ".experts." in name or "shared_experts" in name
            size = self.moe_tp_size if moe else self.attn_tp_size
            if re.search(r"\.(q_b|kv_b|gate|up)_proj\.", name):
                weight = self._shard(weight, 0, size)
            elif re.search(r"\.(o|down)_proj\.", name):
                weight = self._shard(weight, 1, size)
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], weight)
            loaded_params.add(name)
        return loaded_params


class DraftedLayers(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_tokens = None
        first = config.num_hidden_layers
        self.layers = nn.ModuleDict({str(first): DraftedDecoderLayer(config, infer_config, first)})

    def forward(self, hidden_states, cos_sin, forward_metadata):
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, cos_sin, forward_metadata)
        return hidden_states


class DraftedMTP(DraftedForCausalLM):
    def __init__(self, config, infer_config, comm_manager=None, prefix=""):
        super().__init__(config, infer_config, comm_manager, prefix)
        self.lm_head = None
        self.model = DraftedLayers(config, infer_config)
        self.enorm = DraftedRMSNorm(config.hidden_size)
        self.hnorm = DraftedRMSNorm(config.hidden_size)
        self.norm = DraftedRMSNorm(config.hidden_size)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.rotary_emb = DraftedYarnRotaryEmbedding(config)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, prev_hidden_states=None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids, position_ids = input_ids.view(bsz, -1), position_ids.view(bsz, -1)
        hidden_states = self.model.embed_tokens(input_ids)
        prev_hidden_states = prev_hidden_states.view(bsz, -1, prev_hidden_states.shape[-1])
        hidden_states = self.eh_proj(torch.cat([self.enorm(hidden_states), self.hnorm(prev_hidden_states)], dim=-1))
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        hidden_states = self.model(hidden_states, cos_sin, forward_metadata)
        hidden_states = self.norm(hidden_states)
        prev_hidden_states = hidden_states
        if forward_metadata.is_prefill:
            rows = torch.arange(bsz, device=input_ids.device)
            hidden_states = hidden_states[rows, forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return self.lm_head(hidden_states).float(), prev_hidden_states
