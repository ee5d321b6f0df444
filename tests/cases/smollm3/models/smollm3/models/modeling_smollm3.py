# coding=utf-8
# SmolLM3 for the executor. Batch 1 baseline.

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_smollm3 import SmolConfig


class SmolRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class SmolRotary(nn.Module):
    def __init__(self, dim, max_len, base):
        super().__init__()
        freqs = torch.outer(
            torch.arange(max_len).float(),
            1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)),
        )
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos", emb.cos(), persistent=False)
        self.register_buffer("sin", emb.sin(), persistent=False)

    def forward(self, q, k, position_ids):
        cos = self.cos[position_ids].unsqueeze(2).to(q.dtype)  # [B, S, 1, D]
        sin = self.sin[position_ids].unsqueeze(2).to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class SmolAttention(nn.Module):
    def __init__(self, config: SmolConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.softmax_scale = self.head_dim ** -0.5

        self.q_proj = nn.Linear(config.hidden_size, self.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, config.hidden_size, bias=False)

        self.use_rope = config.no_rope_layers[layer_idx]
        # the released checkpoints do not slide
        self.sliding_window = config.sliding_window if config.use_sliding_window and not self.use_rope else None

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.n_kv_heads, self.head_dim)

    def forward(self, hidden_states, rotary_emb, position_ids, kv_len, **kwargs):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, self.n_heads, self.head_dim)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.n_kv_heads, self.head_dim)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.n_kv_heads, self.head_dim)

        if self.use_rope:
            q, k = rotary_emb(q, k, position_ids)

        # With one request kv_len lists the slots of the new tokens in both phases.
        self.k_cache[:, kv_len] = k
        self.v_cache[:, kv_len] = v

        total = int(kv_len[-1]) + 1
        k = self.k_cache[:, :total]
        v = self.v_cache[:, :total]

        kv_pos = torch.arange(total, device=hidden_states.device)
        visible = kv_pos[None, None, :] <= position_ids[:, :, None]
        if self.sliding_window is not None:
            visible &= kv_pos[None, None, :] > position_ids[:, :, None] - self.sliding_window

        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=visible.unsqueeze(1), scale=self.softmax_scale, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SmolMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SmolDecoderLayer(nn.Module):
    def __init__(self, config: SmolConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = SmolAttention(config, infer_config, layer_idx)
        self.mlp = SmolMLP(config)
        self.input_layernorm = SmolRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = SmolRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, rotary_emb, position_ids, kv_len, **kwargs):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), rotary_emb, position_ids, kv_len, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SmolModel(nn.Module):
    def __init__(self, config: SmolConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [SmolDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = SmolRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = SmolRotary(
            config.hidden_size // config.num_attention_heads, config.max_position_embeddings, config.rope_theta)

    def forward(self, input_ids, position_ids, kv_len, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, self.rotary_emb, position_ids, kv_len, **kwargs)
        return self.norm(hidden_states)


class SmolForCausalLM(nn.Module):
    def __init__(self, config: SmolConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = SmolModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs):
        kv_len = forward_metadata.kv_len
        hidden_states = self.model(
            input_ids.unsqueeze(0), position_ids.unsqueeze(0), kv_len, is_prefill=forward_metadata.is_prefill)
        logits = self.lm_head(hidden_states[:, -1:, :])
        return logits.float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        done = set()
        for name, tensor in weights:
            if name not in params or name == "lm_head.weight":
                continue
            default_weight_loader(params[name], tensor)
            done.add(name)
        self.lm_head.weight = self.model.embed_tokens.weight
        done.add("lm_head.weight")
        return done
