# coding=utf-8
"""Mistral 7B v0.1 with the rolling buffer of its reference code: memory does not grow past the window."""
import torch
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_mistral_ring import RollingConfig


class RollingRMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * out.type_as(x)


def apply_rope(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class RollingAttention(nn.Module):
    def __init__(self, config: RollingConfig, layer_idx: int):
        super().__init__()
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.q_proj = nn.Linear(config.hidden_size, self.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, config.hidden_size, bias=False)
        self.k_cache = None  # [B, window, N, D]
        self.v_cache = None

    def forward(self, x, cos_sin, positions, visible, is_prefill):
        bsz, seqlen, _ = x.shape
        xq = apply_rope(self.q_proj(x).view(bsz, seqlen, self.n_heads, self.head_dim), *cos_sin)
        xk = apply_rope(self.k_proj(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim), *cos_sin)
        xv = self.v_proj(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)

        # only the last `window` tokens stay; token i goes to slot i % window
        keep = min(seqlen, self.window)
        slots = positions[:, -keep:] % self.window
        rows = torch.arange(bsz, device=x.device)[:, None]
        self.k_cache[rows, slots] = xk[:, -keep:]
        self.v_cache[rows, slots] = xv[:, -keep:]

        if is_prefill:
            key, value = xk, xv
        else:
            filled = min(int(positions.max()) + 1, self.window)
            key, value = self.k_cache[:, :filled], self.v_cache[:, :filled]
        out = F.scaled_dot_product_attention(
            xq.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(bsz, seqlen, -1))


class RollingMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RollingLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = RollingAttention(config, layer_idx)
        self.mlp = RollingMLP(config)
        self.input_layernorm = RollingRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RollingRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos_sin, positions, visible, is_prefill):
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, positions, visible, is_prefill)
        return x + self.mlp(self.post_attention_layernorm(x))


class RollingModel(nn.Module):
    def __init__(self, config: RollingConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([RollingLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RollingRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window = config.sliding_window
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, input_ids, positions, is_prefill):
        x = self.embed_tokens(input_ids)
        emb = (positions[..., None].float() * self.inv_freq).repeat(1, 1, 2).unsqueeze(2)
        cos_sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        visible = None
        if is_prefill:
            distance = positions[:, :, None] - positions[:, None, :]
            visible = ((distance >= 0) & (distance < self.window)).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos_sin, positions, visible, is_prefill)
        return self.norm(x)


class RollingForCausalLM(nn.Module):
    def __init__(self, config: RollingConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = RollingModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        shape = (self.batch_size, self.config.sliding_window, self.config.num_key_value_heads, self.config.head_dim)
        for layer in self.model.layers:
            layer.self_attn.k_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)
            layer.self_attn.v_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids.view(self.batch_size, -1), position_ids.view(self.batch_size, -1), forward_metadata.is_prefill)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
