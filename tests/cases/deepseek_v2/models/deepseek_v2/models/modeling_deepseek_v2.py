"""DeepSeek-V2-Lite for the inference framework (Legacy KV cache).

What is cached per token and layer: the normalised latent and the rotated rope part. Keys and values are expanded
from them again in every step.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.model_loader.weight_utils import default_weight_loader

from .configuration_deepseek_v2 import DeepseekV2Config


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]


def rope_table(config, position_ids):
    """[B, S] -> complex [B, S, rope / 2]"""
    dim = config.qk_rope_head_dim
    inv_freq = 1.0 / (config.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angles = position_ids.float().unsqueeze(-1) * inv_freq.to(position_ids.device)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, table):
    """Pairs (2i, 2i+1) of x [B, N, S, D] as complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(3).type_as(x)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok
        self.factor = config.routed_scaling_factor

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).softmax(dim=-1, dtype=torch.float32)
        weight, index = scores.topk(self.top_k, dim=-1, sorted=False)
        return weight * self.factor, index


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.n_routed_experts))
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x):
        bsz, seq, hidden = x.shape
        flat = x.reshape(bsz * seq, hidden)
        weight, index = self.gate(flat)
        out = self.shared_experts(flat)
        for i, expert in enumerate(self.experts):
            share = torch.where(index == i, weight, torch.zeros_like(weight)).sum(dim=-1, keepdim=True)
            out = out + expert(flat) * share.to(flat.dtype)
        return out.reshape(bsz, seq, hidden)


class LatentAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_heads = config.num_attention_heads
        self.latent_dim = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.scaling = (self.nope_dim + self.rope_dim) ** -0.5

        self.q_proj = nn.Linear(config.hidden_size, self.n_heads * (self.nope_dim + self.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.latent_dim + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent_dim)
        self.kv_b_proj = nn.Linear(self.latent_dim, self.n_heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.n_heads * self.value_dim, config.hidden_size, bias=False)

        self.latent_cache = torch.Tensor([])
        self.pe_cache = torch.Tensor([])

    def project(self, x, table):
        bsz, seq, _ = x.shape
        q = self.q_proj(x).view(bsz, seq, self.n_heads, self.nope_dim + self.rope_dim).transpose(1, 2)
        q_nope, q_pe = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([self.latent_dim, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        q_pe = rotate(q_pe, table)
        k_pe = rotate(k_pe.unsqueeze(1), table).squeeze(1)
        return q_nope, q_pe, latent, k_pe

    def forward(self, x, table, forward_metadata):
        bsz, seq, _ = x.shape
        q_nope, q_pe, latent, k_pe = self.project(x, table)

        # [B, S, D] into [B, C, D] at the row's own offset
        offset = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            offset = torch.zeros(bsz, dtype=torch.int64, device=x.device)
        torch_npu.scatter_update_(self.latent_cache, offset, latent, 1)
        torch_npu.scatter_update_(self.pe_cache, offset, k_pe, 1)

        length = seq
        if not forward_metadata.is_prefill:
            length = int(forward_metadata.actual_seq_lengths_kv.max())
        latent, k_pe = self.latent_cache[:, :length], self.pe_cache[:, :length]

        kv = self.kv_b_proj(latent).view(bsz, length, self.n_heads, self.nope_dim + self.value_dim).transpose(1, 2)
        k_nope, value = kv.split([self.nope_dim, self.value_dim], dim=-1)
        query = torch.cat([q_nope, q_pe], dim=-1)
        key = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, self.n_heads, -1, -1)], dim=-1)
        mask = None
        if forward_metadata.is_prefill:
            mask = torch.logical_not(forward_metadata.attention_mask[:seq, :seq])
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        context = context.transpose(1, 2).reshape(bsz, seq, self.n_heads * self.value_dim)
        return self.o_proj(context)


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer_idx < config.first_k_dense_replace:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MoE(config)

    def forward(self, x, table, forward_metadata):
        x = x + self.self_attn(self.input_layernorm(x), table, forward_metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV2Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, forward_metadata):
        x = self.embed_tokens(input_ids)
        table = rope_table(self.config, position_ids)
        for block in self.layers:
            x = block(x, table, forward_metadata)
        return self.norm(x)


class DeepseekV2ForCausalLM(nn.Module):
    def __init__(self, config: DeepseekV2Config, infer_config, comm_manager=None, prefix=""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = DeepseekV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        length = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        for block in self.model.layers:
            attention = block.self_attn
            like = dict(dtype=self.lm_head.weight.dtype, device=device)
            attention.latent_cache = torch.zeros(rows, length, self.config.kv_lora_rank, **like)
            attention.pe_cache = torch.zeros(rows, length, self.config.qk_rope_head_dim, **like)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, **kwargs):
        rows = forward_metadata.actual_seq_lengths_q.shape[0]
        x = self.model(input_ids.view(rows, -1), position_ids.view(rows, -1), forward_metadata)
        if forward_metadata.is_prefill:
            last = (forward_metadata.actual_seq_lengths_q - 1).view(rows, 1, 1).expand(-1, -1, x.shape[-1])
            x = torch.gather(x, 1, last)
        return self.lm_head(x).float()

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(own[name], tensor)
        return set(own)
