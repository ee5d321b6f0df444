# coding=utf-8
"""Llama 3.2 Vision, language part. Some layers attend to the image states instead of the text."""
import math
from typing import Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_mllama import VisionLlamaTextConfig


class MllamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


def scaled_inv_freq(dim, rope):
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.get("rope_type", "default") != "llama3":
        return inv_freq
    old_len = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelen = 2 * math.pi / inv_freq
    smooth = ((old_len / wavelen - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def apply_rope(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class MllamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionBase(nn.Module):
    def __init__(self, config: VisionLlamaTextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def heads(self, x, n):
        return x.view(x.shape[0], -1, n, self.head_dim)

    def attend(self, q, k, v, is_causal):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=is_causal, scale=self.scaling, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MllamaTextSelfAttention(AttentionBase):
    def __init__(self, config: VisionLlamaTextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads, self.head_dim)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        q = apply_rope(self.heads(self.q_proj(hidden_states), self.num_heads), *cos_sin)
        k = apply_rope(self.heads(self.k_proj(hidden_states), self.num_key_value_heads), *cos_sin)
        v = self.heads(self.v_proj(hidden_states), self.num_key_value_heads)
        torch_npu.scatter_update_(self.k_cache, kv_len, k, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, v, 1)
        if not is_prefill:
            k, v = self.k_cache[:, :total_len], self.v_cache[:, :total_len]
        return self.attend(q, k, v, is_causal=is_prefill)


class MllamaTextCrossAttention(AttentionBase):
    """Queries from the text, keys and values from the image. They are computed once, in prefill."""

    def __init__(self, config: VisionLlamaTextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = MllamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = MllamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.cross_k_cache = torch.Tensor([])
        self.cross_v_cache = torch.Tensor([])
        self.cross_len = 0

    def forward(self, hidden_states, cross_attention_states=None):
        q = self.q_norm(self.heads(self.q_proj(hidden_states), self.num_heads))
        if cross_attention_states is not None:
            self.cross_len = cross_attention_states.shape[1]
            k = self.k_norm(self.heads(self.k_proj(cross_attention_states), self.num_key_value_heads))
            v = self.heads(self.v_proj(cross_attention_states), self.num_key_value_heads)
            self.cross_k_cache[:, : self.cross_len] = k
            self.cross_v_cache[:, : self.cross_len] = v
        k = self.cross_k_cache[:, : self.cross_len]
        v = self.cross_v_cache[:, : self.cross_len]
        return self.attend(q, k, v, is_causal=False)


class MllamaSelfAttentionDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = MllamaTextSelfAttention(config, layer_idx)
        self.mlp = MllamaMLP(config)
        self.input_layernorm = MllamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MllamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), cos_sin, kv_len, total_len, is_prefill)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MllamaCrossAttentionDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.cross_attn = MllamaTextCrossAttention(config, layer_idx)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.mlp = MllamaMLP(config)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))
        self.input_layernorm = MllamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MllamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cross_attention_states):
        attn = self.cross_attn(self.input_layernorm(hidden_states), cross_attention_states)
        hidden_states = hidden_states + self.cross_attn_attn_gate.tanh() * attn
        mlp = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.cross_attn_mlp_gate.tanh() * mlp


class MllamaTextModel(nn.Module):
    def __init__(self, config: VisionLlamaTextConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size + 8, config.hidden_size)
        self.cross_attention_layers = config.cross_attention_layers
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            layer_cls = (MllamaCrossAttentionDecoderLayer if layer_idx in self.cross_attention_layers
                         else MllamaSelfAttentionDecoderLayer)
            self.layers.append(layer_cls(config, layer_idx))
        self.norm = MllamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer(
            "inv_freq", scaled_inv_freq(config.hidden_size // config.num_attention_heads, config.rope),
            persistent=False)
        self.has_image = False

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, cross_attention_states=None):
        bsz, q_len = input_ids.shape
        is_prefill = forward_metadata.is_prefill
        if is_prefill:
            self.has_image = cross_attention_states is not None
            kv_len, total_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device), q_len
        else:
            kv_len = forward_metadata.kv_len
            total_len = int(kv_len.max()) + 1

        hidden_states = self.embed_tokens(input_ids)
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1).unsqueeze(2)
        cos_sin = (emb.cos().to(hidden_states.dtype), emb.sin().to(hidden_states.dtype))
        for layer_idx, layer in enumerate(self.layers):
            if layer_idx not in self.cross_attention_layers:
                hidden_states = layer(hidden_states, cos_sin, kv_len, total_len, is_prefill)
            elif self.has_image:
                hidden_states = layer(hidden_states, cross_attention_states)
        return self.norm(hidden_states)


class MllamaForCausalLM(nn.Module):
    def __init__(self, config: VisionLlamaTextConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = MllamaTextModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        dtype = self.lm_head.weight.dtype
        text_len = self.infer_config.data_config.input_truncated_len \
            + self.infer_config.scheduler_config.max_new_tokens
        for layer_idx, layer in enumerate(self.model.layers):
            if layer_idx in self.config.cross_attention_layers:
                attn = layer.cross_attn
                shape = (self.batch_size, self.config.max_image_tokens, attn.num_key_value_heads, attn.head_dim)
                attn.cross_k_cache = torch.zeros(shape, dtype=dtype, device=device)
                attn.cross_v_cache = torch.zeros(shape, dtype=dtype, device=device)
            else:
                attn = layer.self_attn
                shape = (self.batch_size, text_len, *attn.cache_unit)
                attn.k_cache = torch.zeros(shape, dtype=dtype, device=device)
                attn.v_cache = torch.zeros(shape, dtype=dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids.view(self.batch_size, -1),
            position_ids.view(self.batch_size, -1),
            forward_metadata,
            cross_attention_states=kwargs.get("cross_attention_states"),
        )
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            name = name.removeprefix("language_model.")
            if name not in params:
                continue  # vision tower
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
