# coding=utf-8
"""EmbeddingGemma: Gemma 3 whose tokens look in both directions. Kept on the decoder code path, cache included."""
from typing import Dict, Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gemma3_embedding import EncoderGemmaConfig


class EncoderRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        out = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (out * (1.0 + self.weight.float())).type_as(x)


class EncoderMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class EncoderAttention(nn.Module):
    def __init__(self, config: EncoderGemmaConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scaling = config.query_pre_attn_scalar ** -0.5
        self.is_causal = not config.use_bidirectional_attention
        self.is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = EncoderRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = EncoderRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads * self.head_dim,)

    def forward(self, hidden_states, cos_sin, attention_mask, kv_len, total_len):
        bsz, q_len, _ = hidden_states.shape
        cos, sin = cos_sin
        q = self.q_norm(self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim))
        v = self.v_proj(hidden_states)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin

        torch_npu.scatter_update_(self.k_cache, kv_len, k.view(bsz, q_len, -1), -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, v, -2)
        k = self.k_cache[:, :total_len].view(bsz, total_len, -1, self.head_dim)
        v = self.v_cache[:, :total_len].view(bsz, total_len, -1, self.head_dim)

        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=attention_mask, is_causal=False, scale=self.scaling, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1))


class EncoderLayer(nn.Module):
    def __init__(self, config: EncoderGemmaConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = EncoderAttention(config, infer_config, layer_idx)
        self.mlp = EncoderMLP(config)
        self.input_layernorm = EncoderRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = EncoderRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = EncoderRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = EncoderRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, attention_mask, kv_len, total_len):
        attn = self.self_attn(self.input_layernorm(hidden_states), cos_sin, attention_mask, kv_len, total_len)
        hidden_states = hidden_states + self.post_attention_layernorm(attn)
        mlp = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(mlp)


class EncoderModel(nn.Module):
    def __init__(self, config: EncoderGemmaConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [EncoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = EncoderRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _masks(self, position_ids, total_len) -> Dict[str, Optional[torch.Tensor]]:
        distance = position_ids[:, None, :, None] - torch.arange(total_len, device=position_ids.device)
        if self.config.use_bidirectional_attention:
            return {"full_attention": None, "sliding_attention": distance.abs() < self.config.sliding_window}
        causal = distance >= 0
        return {"full_attention": causal, "sliding_attention": causal & (distance < self.config.sliding_window)}

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        if forward_metadata.is_prefill:
            kv_len, total_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device), q_len
        else:
            kv_len, total_len = forward_metadata.kv_len, int(forward_metadata.kv_len.max()) + 1
        hidden_states = self.embed_tokens(input_ids) * self.config.hidden_size ** 0.5
        masks = self._masks(position_ids, total_len)
        tables = {}
        for layer_type, base in self.config.rope_bases.items():
            dim = self.config.head_dim
            inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, device=input_ids.device).float() / dim))
            emb = (position_ids[..., None].float() * inv_freq).repeat(1, 1, 2).unsqueeze(2)
            tables[layer_type] = (emb.cos().to(hidden_states.dtype), emb.sin().to(hidden_states.dtype))
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(hidden_states, tables[layer_type], masks[layer_type], kv_len, total_len)
        return self.norm(hidden_states)


class EncoderGemmaForCausalLM(nn.Module):
    def __init__(self, config: EncoderGemmaConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = EncoderModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name == "lm_head.weight":
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        self.lm_head.weight = self.model.embed_tokens.weight
        loaded.add("lm_head.weight")
        return loaded
