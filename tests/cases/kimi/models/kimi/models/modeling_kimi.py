import math

import torch
from torch import nn
from torch.nn import functional as F

from executor.core.config import InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_kimi import KimiConfig


class KimiRMSNorm(nn.Module):

    def __init__(self, hidden_size, epsilon=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = epsilon

    def forward(self, x):
        y = x.float()
        y = y * (y.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt()
        return y.to(x.dtype) * self.weight


def mscale_of(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def half_tables(config, positions, dtype):
    """cos and sin [B, S, rope / 2], one angle per pair"""
    settings, dim = config.rope_settings, config.qk_rope_head_dim
    base, length = settings["rope_theta"], settings["original_max_position_embeddings"]
    freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float, device=positions.device) / dim)

    def edge(turns):
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(edge(settings["beta_fast"])), 0)
    last = min(math.ceil(edge(settings["beta_slow"])), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float, device=positions.device) - first) / max(last - first, 1e-3)
    ramp = ramp.clamp(0, 1)
    freq = freq * (1 - ramp) + freq / settings["factor"] * ramp
    angle = positions.float().unsqueeze(-1) * freq
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turn(x, cos, sin):
    """x [B, S, N, rope]: pairs (2i, 2i + 1) go in, halves come out"""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class KimiMLP(nn.Module):

    def __init__(self, hidden_size, inner_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class KimiGate(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts))


class KimiMoE(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.gate = KimiGate(config)
        self.experts = nn.ModuleList(
            [KimiMLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.n_routed_experts)])
        self.shared_experts = KimiMLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x):
        flat = x.flatten(0, -2)
        scores = (flat.float() @ self.gate.weight.float().t()).sigmoid()
        index = (scores + self.gate.e_score_correction_bias).topk(self.top_k, dim=-1)[1]
        weight = scores.gather(1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale
        full = torch.zeros_like(scores).scatter(1, index, weight).to(x.dtype)
        y = self.shared_experts(flat)
        for i, expert in enumerate(self.experts):
            y = y + expert(flat) * full[:, i:i + 1]
        return y.view_as(x)


class KimiAttention(nn.Module):

    def __init__(self, config: KimiConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.nope, self.rope, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KimiRMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.kv_lora_rank + self.rope, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, config.hidden_size, bias=False)
        mscale = mscale_of(config.rope_settings["factor"], config.rope_settings["mscale_all_dim"])
        self.softmax_scale = (self.nope + self.rope) ** -0.5 * mscale ** 2

        # a row of k_cache is [latent | rope]; v_cache is there for the engine's allocation only
        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.kv_lora_rank + self.rope,)

    def forward(self, x, tables, kv_len, forward_metadata):
        bsz, q_len = x.shape[:2]
        cos, sin = tables
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(bsz, q_len, self.num_heads, -1)
        q_nope, q_rope = torch.split(q, [self.nope, self.rope], dim=-1)
        q_rope = turn(q_rope, cos, sin)

        down = self.kv_a_proj_with_mqa(x)
        c_kv = self.kv_a_layernorm(down[..., :self.kv_lora_rank])
        k_rope = turn(down[..., self.kv_lora_rank:].unsqueeze(2), cos, sin).squeeze(2)
        row = torch.cat([c_kv, k_rope], dim=-1)

        rows = torch.arange(bsz, device=x.device)
        if forward_metadata.is_prefill:
            self.k_cache[:bsz, :q_len] = row
        else:
            self.k_cache[rows, kv_len] = row[:, 0]
            row = self.k_cache[:bsz, :int(kv_len.max()) + 1]
        c_kv, k_rope = torch.split(row, [self.kv_lora_rank, self.rope], dim=-1)

        up = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.v_dim, self.kv_lora_rank)
        w_key, w_value = up[:, :self.nope], up[:, self.nope:]
        q_latent = torch.einsum("bshd,hdc->bshc", q_nope, w_key)
        scores = torch.einsum("bshc,btc->bhst", q_latent, c_kv) + torch.einsum("bshr,btr->bhst", q_rope, k_rope)
        scores = scores * self.softmax_scale
        if forward_metadata.is_prefill:
            scores = scores.masked_fill(forward_metadata.attention_mask[:q_len, :q_len], float("-inf"))
        probs = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        mixed = torch.einsum("bhst,btc->bshc", probs, c_kv)
        attn_output = torch.einsum("bshc,hvc->bshv", mixed, w_value)
        return self.o_proj(attn_output.reshape(bsz, q_len, self.num_heads * self.v_dim))


class KimiLayer(nn.Module):

    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = KimiAttention(config, layer_idx)
        sparse = layer_idx >= config.first_k_dense_replace
        self.mlp = KimiMoE(config) if sparse else KimiMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, tables, kv_len, forward_metadata):
        x = x + self.self_attn(self.input_layernorm(x), tables, kv_len, forward_metadata)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class KimiModel(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KimiLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, forward_metadata):
        x = self.embed_tokens(input_ids)
        tables = half_tables(self.config, position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, tables, forward_metadata.kv_len, forward_metadata)
        return self.norm(x)


class KimiForCausalLM(nn.Module):

    def __init__(self, config: KimiConfig, infer_config: InferenceConfig, comm_manager=None, prefix: str = ""):
        super().__init__()
        self.infer_config = infer_config
        self.model = KimiModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_kv.shape[0]
        x = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        if forward_metadata.is_prefill:
            x = x[torch.arange(bsz, device=x.device), forward_metadata.actual_seq_lengths_q - 1][:, None]
        return self.lm_head(x).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        done = set()
        for name, loaded in weights:
            if name in params:
                default_weight_loader(params[name], loaded)
                done.add(name)
        return done
