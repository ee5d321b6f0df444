"""MiniCPM3: latent attention of small sizes, Legacy KV cache."""
import math

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.model_loader.weight_utils import default_weight_loader

from .configuration_minicpm3 import MiniCPMConfig


class MiniCPMNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]


def rotary(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class MiniCPMAttention(nn.Module):
    def __init__(self, config: MiniCPMConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self.rank = config.kv_lora_rank
        self.head_dim = self.nope_dim + self.rope_dim
        self.scale = self.head_dim ** -0.5
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = MiniCPMNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = MiniCPMNorm(self.rank)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, config.hidden_size, bias=False)
        self.k_cache, self.v_cache = torch.Tensor([]), torch.Tensor([])
        self.cache_unit = (self.heads, self.head_dim)

    def forward(self, x, cos, sin, meta):
        bsz, seq, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(bsz, seq, self.heads, self.head_dim)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(bsz, seq, self.heads, self.nope_dim + self.v_dim)
        k_nope, value = kv.split([self.nope_dim, self.v_dim], dim=-1)
        q_rope = rotary(q_rope, cos, sin)
        k_rope = rotary(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, self.heads, -1)
        query = torch.cat((q_nope, q_rope), dim=-1)
        key = torch.cat((k_nope, k_rope), dim=-1)
        value = F.pad(value, (0, self.head_dim - self.v_dim))

        at = torch.zeros_like(meta.actual_seq_lengths_q) if meta.is_prefill else meta.kv_len
        torch_npu.scatter_update_(self.k_cache, at, key, 1)
        torch_npu.scatter_update_(self.v_cache, at, value, 1)
        mask = None
        if meta.is_prefill:
            mask = ~meta.attention_mask[:seq, :seq]
        else:
            end = int(meta.actual_seq_lengths_kv.max())
            key, value = self.k_cache[:, :end], self.v_cache[:, :end]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=self.scale)
        out = out.transpose(1, 2)[..., :self.v_dim]
        return self.o_proj(out.reshape(bsz, seq, -1))


class MiniCPMMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MiniCPMLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = MiniCPMAttention(config)
        self.mlp = MiniCPMMLP(config)
        self.input_layernorm = MiniCPMNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MiniCPMNorm(config.hidden_size, config.rms_norm_eps)
        self.branch = config.scale_depth / math.sqrt(config.num_hidden_layers)

    def forward(self, x, cos, sin, meta):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, meta) * self.branch
        return x + self.mlp(self.post_attention_layernorm(x)) * self.branch


class MiniCPMModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([MiniCPMLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = MiniCPMNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, meta):
        x = self.embed_tokens(input_ids) * self.config.scale_emb
        dim = self.config.qk_rope_head_dim
        freq = self.config.rope_theta ** -(torch.arange(0, dim, 2, device=x.device).float() / dim)
        angle = position_ids[..., None].float() * freq
        angle = torch.cat((angle, angle), dim=-1).unsqueeze(2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, meta)
        return self.norm(x)


class MiniCPM3ForCausalLM(nn.Module):
    def __init__(self, config, infer_config, comm_manager=None, prefix=""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = MiniCPMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.shrink = config.hidden_size / config.dim_model_base

    def forward(self, input_ids, position_ids=None, forward_metadata=None, **kwargs):
        rows = forward_metadata.actual_seq_lengths_q.shape[0]
        x = self.model(input_ids.view(rows, -1), position_ids.view(rows, -1), forward_metadata)
        if forward_metadata.is_prefill:
            x = x[torch.arange(rows, device=x.device), forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return self.lm_head(x / self.shrink).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            default_weight_loader(params[name], weight)
            loaded.add(name)
            if name == "model.embed_tokens.weight" and self.config.tie_word_embeddings:
                default_weight_loader(params["lm_head.weight"], weight)
                loaded.add("lm_head.weight")
        return loaded
