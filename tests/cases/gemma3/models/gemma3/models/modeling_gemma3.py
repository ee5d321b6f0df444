# coding=utf-8
# Adapted from Hugging Face transformers, models/gemma3 (Apache License 2.0).
"""Gemma 3 文本模型（Legacy KV cache + SDPA，单卡 eager 基线）。"""
from typing import Any, Dict, Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gemma3 import Gemma3TextConfig


class Gemma3RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        # (1 + w)，且先乘权重再转回低精度，与 Llama 不同
        normed = normed * (1.0 + self.weight.float())
        return normed.type_as(x)


class Gemma3MLP(nn.Module):
    def __init__(self, config: Gemma3TextConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma3RotaryEmbedding(nn.Module):
    """One instance serves one layer type."""

    def __init__(self, head_dim: int, base: float, factor: float):
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self.register_buffer("inv_freq", 1.0 / (base**exponent) / factor, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids.float().unsqueeze(-1) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def build_causal_mask(position_ids, kv_length, dtype, window: Optional[int] = None):
    """Additive mask [B, 1, Sq, Skv]. With a window a query sees itself and the window - 1 tokens before it."""
    query_index = position_ids.unsqueeze(-1)
    key_index = torch.arange(kv_length, device=position_ids.device).view(1, 1, -1)
    hidden = key_index > query_index
    if window is not None:
        hidden = hidden | (query_index - key_index >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=position_ids.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


class Gemma3Attention(nn.Module):
    def __init__(self, config: Gemma3TextConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if self.is_sliding else None
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.scaling = config.query_pre_attn_scalar**-0.5

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Gemma3RMSNorm(dim=config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Gemma3RMSNorm(dim=config.head_dim, eps=config.rms_norm_eps)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def prepare_qkv(self, hidden_states, position_embeddings) -> Dict[str, torch.Tensor]:
        bsz, q_len = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)

        query_states = self.q_norm(query_states)
        key_states = self.k_norm(key_states)

        cos, sin = (t.unsqueeze(2) for t in position_embeddings)
        query_states = query_states * cos + rotate_half(query_states) * sin
        key_states = key_states * cos + rotate_half(key_states) * sin
        return {"query_states": query_states, "key_states": key_states, "value_states": value_states}

    def forward_attention(self, input_kwargs: Dict[str, Any]) -> torch.Tensor:
        query_states = input_kwargs["query_states"]
        key_states = input_kwargs["key_states"]
        value_states = input_kwargs["value_states"]
        attention_mask = input_kwargs["attention_mask"]
        kv_start = input_kwargs["kv_start"]

        if not self.k_cache.numel():
            raise RuntimeError("k_cache is empty: init_kvcache has not run")
        torch_npu.scatter_update_(self.k_cache, kv_start, key_states, -3)
        torch_npu.scatter_update_(self.v_cache, kv_start, value_states, -3)
        if not input_kwargs["is_prefill"]:
            kv_length = attention_mask.size(-1)
            key_states = self.k_cache[:, :kv_length]
            value_states = self.v_cache[:, :kv_length]

        # BSND -> BNSD，GQA 头展开
        key_states = key_states.transpose(1, 2).repeat_interleave(self.num_key_value_groups, dim=1)
        value_states = value_states.transpose(1, 2).repeat_interleave(self.num_key_value_groups, dim=1)
        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2), key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        return attn_output.transpose(1, 2).flatten(2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        kv_start: torch.Tensor,
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        input_kwargs = self.prepare_qkv(hidden_states, position_embeddings)
        input_kwargs.update({
            "attention_mask": attention_mask,
            "kv_start": kv_start,
            "is_prefill": forward_metadata.is_prefill,
        })
        attn_output = self.forward_attention(input_kwargs)
        return self.o_proj(attn_output)


class Gemma3DecoderLayer(nn.Module):
    def __init__(self, config: Gemma3TextConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Gemma3Attention(config, layer_idx)
        self.mlp = Gemma3MLP(config)
        self.input_layernorm = Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, attention_mask, kv_start, forward_metadata):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(
            hidden_states, position_embeddings, attention_mask, kv_start, forward_metadata
        )
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return residual + hidden_states


class Gemma3TextModel(nn.Module):
    def __init__(self, config: Gemma3TextConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [Gemma3DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = nn.ModuleDict({
            layer_type: Gemma3RotaryEmbedding(config.head_dim, base, factor)
            for layer_type, (base, factor) in config.rotary_settings.items()
        })

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids)
        # HF 在 bf16 下对该系数取整，这里保持同样写法
        hidden_states = hidden_states * torch.tensor(self.config.hidden_size**0.5, dtype=hidden_states.dtype)

        if forward_metadata.is_prefill:
            kv_length = input_ids.shape[1]
        else:
            kv_length = int(forward_metadata.kv_len.max()) + 1
        # per-row write offset: 0 for a fresh prompt, the new token's slot in decode
        kv_start = position_ids.amin(dim=-1)

        dtype = hidden_states.dtype
        masks = {
            "full_attention": build_causal_mask(position_ids, kv_length, dtype),
            "sliding_attention": build_causal_mask(position_ids, kv_length, dtype, self.config.sliding_window),
        }
        position_embeddings = {
            layer_type: rotary(hidden_states, position_ids) for layer_type, rotary in self.rotary_emb.items()
        }
        for layer_idx, decoder_layer in enumerate(self.layers):
            layer_type = self.config.layer_types[layer_idx]
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings[layer_type],
                masks[layer_type],
                kv_start,
                forward_metadata,
            )
        return self.norm(hidden_states)


class Gemma3ForCausalLM(nn.Module):
    def __init__(
        self,
        config: Gemma3TextConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Gemma3TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        slot_mapping: Optional[Dict[str, torch.Tensor]] = None,
        block_table: Optional[Dict[str, torch.Tensor]] = None,
        **kwargs,
    ):
        # ---- BSND shim begin: 框架输入为 packed 一维，这里还原成 [B, S]（仅等长 batch） ----
        num_requests = forward_metadata.actual_seq_lengths_q.numel()
        input_ids = input_ids.reshape(num_requests, -1)
        position_ids = position_ids.reshape(num_requests, -1)
        # ---- BSND shim end ----

        hidden_states = self.model(input_ids, position_ids, forward_metadata)
        bs, q_len, hidden_size = hidden_states.shape
        if forward_metadata.is_prefill:
            gather_index, _ = torch.max(position_ids, dim=-1)
            seq_index = (gather_index + 1).cumsum(-1) - 1
            hidden_states = hidden_states.view(1, -1, hidden_size).index_select(1, seq_index)
            q_len = 1
        logits = self.lm_head(hidden_states.view(bs * q_len, 1, hidden_size))
        logits = logits.view(bs, q_len, -1)
        if self.config.final_logit_softcapping is not None:
            cap = self.config.final_logit_softcapping
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, weight in weights:
            if name in params_dict:
                default_weight_loader(params_dict[name], weight)
                loaded_params.add(name)
        if self.config.tie_word_embeddings and "lm_head.weight" not in loaded_params:
            default_weight_loader(self.lm_head.weight, self.model.embed_tokens.weight)
            loaded_params.add("lm_head.weight")
        return loaded_params


__all__ = ["Gemma3ForCausalLM", "Gemma3TextModel"]
