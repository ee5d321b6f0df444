"""tiny_latent on the framework: multi-head latent attention with a contiguous (Legacy) cache of expanded K and V.

The compressed form is only a projection here: every token's keys and values are expanded once and kept. The
framework sends packed 1-D tokens; the model folds them back to [batch, seq].
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.model_loader.weight_utils import default_weight_loader

from .configuration_tiny_latent import TinyLatentConfig


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]


def turn_pairs(x, cos, sin):
    """Rotate the pairs (2i, 2i + 1) of x [B, N, S, D]; cos, sin: [B, S, D / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class GatedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyLatentAttention(nn.Module):
    """The cache holds [batch, length, N * (nope + rope)] keys and [batch, length, N * v] values."""

    def __init__(self, config: TinyLatentConfig, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.width = self.nope + self.rope
        self.scale = self.width**-0.5

        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank, 1e-6)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = Norm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, config.hidden_size, bias=False)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def forward(self, hidden_states, cos, sin, forward_metadata):
        b, s, _ = hidden_states.shape
        is_prefill = forward_metadata.is_prefill
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(b, s, self.heads, self.width).transpose(1, 2)
        q_nope, q_rope = torch.split(q, [self.nope, self.rope], dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, k_rope = torch.split(compressed, [self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(b, s, self.heads, self.nope + self.value).transpose(1, 2)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        q_rope = turn_pairs(q_rope, cos, sin)
        k_rope = turn_pairs(k_rope.view(b, 1, s, self.rope), cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)

        start = torch.zeros(b, dtype=torch.long, device=q.device) if is_prefill else forward_metadata.kv_len
        torch_npu.scatter_update_(self.k_cache, start, k.transpose(1, 2).reshape(b, s, -1), -2)
        torch_npu.scatter_update_(self.v_cache, start, v.transpose(1, 2).reshape(b, s, -1), -2)

        mask = None
        if not is_prefill:
            lengths = forward_metadata.actual_seq_lengths_kv
            total = int(lengths.max())
            k = self.k_cache[:b, :total].view(b, total, self.heads, self.width).transpose(1, 2)
            v = self.v_cache[:b, :total].view(b, total, self.heads, self.value).transpose(1, 2)
            mask = (torch.arange(total, device=q.device)[None, :] < lengths[:, None])[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_prefill, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, self.heads * self.value))


class TinyLatentLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = TinyLatentAttention(config, layer_idx)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x, cos, sin, forward_metadata):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, forward_metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLatentModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyLatentLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rope_dim, self.rope_base = config.qk_rope_head_dim, config.rope_base

    def forward(self, input_ids, position_ids, forward_metadata):
        x = self.embed_tokens(input_ids)
        powers = torch.arange(0, self.rope_dim, 2, dtype=torch.float32, device=x.device) / self.rope_dim
        angles = position_ids[..., None].float() * self.rope_base**-powers
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, forward_metadata)
        return self.norm(x)


class TinyLatentForCausalLM(nn.Module):
    def __init__(self, config: TinyLatentConfig, infer_config, comm_manager=None, prefix=""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = TinyLatentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        scheduler, data = self.infer_config.scheduler_config, self.infer_config.data_config
        length = data.input_truncated_len + scheduler.max_new_tokens
        for layer in self.model.layers:
            attn = layer.self_attn
            like = {"dtype": self.lm_head.weight.dtype, "device": device}
            attn.k_cache = torch.zeros(scheduler.batch_size_per_dp_rank, length, attn.heads * attn.width, **like)
            attn.v_cache = torch.zeros(scheduler.batch_size_per_dp_rank, length, attn.heads * attn.value, **like)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, **kwargs):
        b = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(b, -1), position_ids.view(b, -1), forward_metadata)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[:, -1:]
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name in own:
                default_weight_loader(own[name], tensor)
                loaded.add(name)
        return loaded
