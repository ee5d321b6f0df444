# coding=utf-8
"""Qwen3-Next: three gated delta-rule layers, then one gated attention layer; MoE everywhere."""
from typing import Iterable, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_qwen3_next import NextConfig


class NextRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        # centred at one
        return (out * (1.0 + self.weight.float())).type_as(x)


class NextRMSNormGated(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, gate):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = self.weight * x.to(dtype)
        return (x * F.silu(gate.float())).to(dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_partial_rope(x, cos, sin):
    """x: [B, S, N, D], cos: [B, S, 1, R]"""
    rot, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([rot * cos + rotate_half(rot) * sin, rest], dim=-1)


class NextAttention(nn.Module):
    def __init__(self, config: NextConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = NextRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = NextRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        bsz, q_len, _ = hidden_states.shape
        q, gate = self.q_proj(hidden_states).view(bsz, q_len, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)
        v = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)
        q = apply_partial_rope(self.q_norm(q), *cos_sin)
        k = apply_partial_rope(self.k_norm(k), *cos_sin)

        torch_npu.scatter_update_(self.k_cache, kv_len, k, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, v, 1)
        if not is_prefill:
            k, v = self.k_cache[:, :total_len], self.v_cache[:, :total_len]

        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=is_prefill, scale=self.scaling, enable_gqa=True)
        out = out.transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(out.reshape(bsz, q_len, -1))


class GatedDeltaNet(nn.Module):
    """Linear attention. Two states per batch row: the last conv inputs, and a matrix per head."""

    def __init__(self, config: NextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_k_heads = config.linear_num_key_heads
        self.num_v_heads = config.linear_num_value_heads
        self.head_k_dim = config.linear_key_head_dim
        self.head_v_dim = config.linear_value_head_dim
        self.key_dim = self.num_k_heads * self.head_k_dim
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, self.conv_kernel_size, groups=self.conv_dim, bias=False)
        self.in_proj_qkvz = nn.Linear(config.hidden_size, 2 * self.key_dim + 2 * self.value_dim, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * self.num_v_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.num_v_heads))
        self.A_log = nn.Parameter(torch.zeros(self.num_v_heads))
        self.norm = NextRMSNormGated(self.head_v_dim, eps=config.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_dim, config.hidden_size, bias=False)
        self.conv_state = torch.Tensor([])
        self.recurrent_state = torch.Tensor([])

    def split_projections(self, hidden_states):
        lead = hidden_states.shape[:-1]
        ratio = self.num_v_heads // self.num_k_heads
        qkvz = self.in_proj_qkvz(hidden_states).view(*lead, self.num_k_heads, -1)
        q, k, v, z = qkvz.split(
            [self.head_k_dim, self.head_k_dim, ratio * self.head_v_dim, ratio * self.head_v_dim], dim=-1)
        b, a = self.in_proj_ba(hidden_states).view(*lead, self.num_k_heads, -1).split([ratio, ratio], dim=-1)
        mixed = torch.cat([t.reshape(*lead, -1) for t in (q, k, v)], dim=-1)
        return mixed, z.reshape(*lead, self.num_v_heads, self.head_v_dim), b.reshape(*lead, -1), a.reshape(*lead, -1)

    def conv(self, mixed, is_prefill):
        mixed = mixed.transpose(1, 2)
        past = torch.zeros_like(self.conv_state) if is_prefill else self.conv_state
        window = torch.cat([past, mixed], dim=-1)
        self.conv_state.copy_(window[..., -(self.conv_kernel_size - 1):])
        return F.silu(self.conv1d(window)).transpose(1, 2)

    def delta_rule(self, q, k, v, g, beta, is_prefill):
        """One token after the other; the state is [B, Nv, Dk, Dv]."""
        state = torch.zeros_like(self.recurrent_state) if is_prefill else self.recurrent_state
        outputs = []
        for i in range(q.shape[1]):
            state = state * g[:, i].exp()[..., None, None]
            predicted = (state * k[:, i, :, :, None]).sum(dim=-2)
            delta = (v[:, i] - predicted) * beta[:, i, :, None]
            state = state + k[:, i, :, :, None] * delta[:, :, None, :]
            outputs.append((state * q[:, i, :, :, None]).sum(dim=-2))
        self.recurrent_state.copy_(state)
        return torch.stack(outputs, dim=1)

    def forward(self, hidden_states, is_prefill):
        bsz, q_len, _ = hidden_states.shape
        mixed, z, b, a = self.split_projections(hidden_states)
        mixed = self.conv(mixed, is_prefill)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        ratio = self.num_v_heads // self.num_k_heads
        q = q.reshape(bsz, q_len, self.num_k_heads, self.head_k_dim).repeat_interleave(ratio, dim=2).float()
        k = k.reshape(bsz, q_len, self.num_k_heads, self.head_k_dim).repeat_interleave(ratio, dim=2).float()
        v = v.reshape(bsz, q_len, self.num_v_heads, self.head_v_dim).float()
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * self.head_k_dim ** -0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        beta = b.float().sigmoid()
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        out = self.delta_rule(q, k, v, g, beta, is_prefill).to(hidden_states.dtype)
        return self.out_proj(self.norm(out, z).reshape(bsz, q_len, -1))


class NextMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NextSparseMoeBlock(nn.Module):
    def __init__(self, config: NextConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [NextMLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts)])
        self.shared_expert = NextMLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states):
        shape = hidden_states.shape
        x = hidden_states.view(-1, shape[-1])
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weight, index = torch.topk(probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        out = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        for expert_idx, expert in enumerate(self.experts):
            token, slot = torch.where(index == expert_idx)
            if token.numel():
                out.index_add_(0, token, (expert(x[token]) * weight[token, slot, None]).to(out.dtype))
        return out.view(shape)


class NextDecoderLayer(nn.Module):
    def __init__(self, config: NextConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        if self.layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, layer_idx)
        else:
            self.self_attn = NextAttention(config, infer_config, layer_idx)
        self.mlp = NextSparseMoeBlock(config)
        self.input_layernorm = NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        if self.layer_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states, is_prefill)
        else:
            hidden_states = self.self_attn(hidden_states, cos_sin, kv_len, total_len, is_prefill)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class NextModel(nn.Module):
    def __init__(self, config: NextConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [NextDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        dim = int(config.head_dim * config.partial_rotary_factor)
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        is_prefill = forward_metadata.is_prefill
        kv_len = forward_metadata.kv_len
        if is_prefill:
            kv_len = torch.zeros(bsz, dtype=kv_len.dtype, device=kv_len.device)
        total_len = q_len if is_prefill else int(kv_len.max()) + 1

        hidden_states = self.embed_tokens(input_ids)
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat([freqs, freqs], dim=-1).unsqueeze(2)
        cos_sin = (emb.cos().to(hidden_states.dtype), emb.sin().to(hidden_states.dtype))
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos_sin, kv_len, total_len, is_prefill)
        return self.norm(hidden_states)


class Qwen3NextForCausalLM(nn.Module):
    def __init__(self, config: NextConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = NextModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        dtype = self.lm_head.weight.dtype
        seq_len = self.infer_config.data_config.input_truncated_len \
            + self.infer_config.scheduler_config.max_new_tokens
        for layer in self.model.layers:
            if layer.layer_type == "full_attention":
                attn = layer.self_attn
                shape = (self.batch_size, seq_len, attn.num_kv_heads, attn.head_dim)
                attn.k_cache = torch.zeros(shape, dtype=dtype, device=device)
                attn.v_cache = torch.zeros(shape, dtype=dtype, device=device)
            else:
                net = layer.linear_attn
                net.conv_state = torch.zeros(
                    (self.batch_size, net.conv_dim, net.conv_kernel_size - 1), dtype=dtype, device=device)
                net.recurrent_state = torch.zeros(
                    (self.batch_size, net.num_v_heads, net.head_k_dim, net.head_v_dim),
                    dtype=torch.float32, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids.view(self.batch_size, -1), position_ids.view(self.batch_size, -1), forward_metadata)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name.startswith("mtp."):
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
