# coding=utf-8
# Granite 3.x for Ascend. Attention runs on the fused kernel with a contiguous (BSH) KV cache.

from typing import Dict, Iterable, Optional, Tuple

import torch
from torch import nn
import torch_npu

from executor.core.config import InferenceConfig, CommManager
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from .configuration_granite import Granite3Config


class GraniteRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]


class GraniteRotaryEmbedding(nn.Module):
    """cos/sin tables, built once for the longest sequence."""

    def __init__(self, dim, max_position_embeddings, base):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        t = torch.arange(max_position_embeddings).float()
        freqs = torch.outer(t, inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos_cached", emb.cos(), persistent=False)
        self.register_buffer("sin_cached", emb.sin(), persistent=False)

    def forward(self, x, seq_len, kv_len, is_prefill):
        if is_prefill:
            cos = self.cos_cached[:seq_len].unsqueeze(0)
            sin = self.sin_cached[:seq_len].unsqueeze(0)
        else:
            # one new token per row, at position kv_len
            cos = torch.index_select(self.cos_cached, 0, kv_len).unsqueeze(1)
            sin = torch.index_select(self.sin_cached, 0, kv_len).unsqueeze(1)
        # [B or 1, S, 1, D]
        return cos.unsqueeze(2).to(x.dtype), sin.unsqueeze(2).to(x.dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class GraniteMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x):
        gate_up = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
        return self.down_proj(torch_npu.npu_swiglu(gate_up))


class GraniteAttention(nn.Module):
    def __init__(self, config: Granite3Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.hidden_size = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_attention_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        # muP: not 1/sqrt(d)
        self.softmax_scale = config.attention_multiplier

        self.q_proj = nn.Linear(self.hidden_size, config.num_attention_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(self.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(self.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, self.hidden_size, bias=config.attention_bias)

        self.fa_ops = torch.ops.npu
        self.k_cache = torch.Tensor()
        self.v_cache = torch.Tensor()
        self.cache_unit = (self.head_dim * self.num_key_value_heads_per_rank,)

    def prepare_qkv(self, hidden_states, input_kwargs: Dict):
        """Project, rotate and write the cache. Everything comes back as [B, S, N*D]."""
        bsz = input_kwargs["bsz"]
        q_len = hidden_states.shape[1]
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_attention_heads_per_rank, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads_per_rank, self.head_dim)
        value_states = self.v_proj(hidden_states)

        cos, sin = input_kwargs["cos_sin"]
        query_states = query_states * cos + rotate_half(query_states) * sin
        key_states = key_states * cos + rotate_half(key_states) * sin

        query_states = query_states.reshape(bsz, q_len, -1)
        key_states = key_states.reshape(bsz, q_len, -1)

        k_cache, v_cache = self.k_cache, self.v_cache
        torch_npu.scatter_update_(k_cache, input_kwargs["kv_len"], key_states, -2)
        torch_npu.scatter_update_(v_cache, input_kwargs["kv_len"], value_states, -2)
        return query_states, key_states, value_states

    def exec_attention(self, query_states, key_states, value_states, input_kwargs: Dict):
        if input_kwargs["is_prefill"]:
            attn_output, _ = self.fa_ops.npu_fused_infer_attention_score(
                query_states, key_states, value_states,
                num_heads=self.num_attention_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                input_layout="BSH",
                atten_mask=input_kwargs["attention_mask"],
                sparse_mode=2,
                scale=self.softmax_scale,
            )
        else:
            attn_output, _ = self.fa_ops.npu_fused_infer_attention_score(
                query_states, self.k_cache, self.v_cache,
                num_heads=self.num_attention_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                input_layout="BSH",
                atten_mask=None,
                sparse_mode=0,
                scale=self.softmax_scale,
                actual_seq_lengths_kv=input_kwargs["actual_seq_lengths_kv"],
            )
        return attn_output

    def forward(self, hidden_states, **input_kwargs):
        # keep [B, S, H] even when a caller hands in packed tokens
        hidden_states = hidden_states.view(input_kwargs["bsz"], -1, self.hidden_size)
        q, k, v = self.prepare_qkv(hidden_states, input_kwargs)
        return self.o_proj(self.exec_attention(q, k, v, input_kwargs))


class GraniteDecoderLayer(nn.Module):
    def __init__(self, config: Granite3Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = GraniteAttention(config, infer_config, layer_idx)
        self.mlp = GraniteMLP(config)
        self.input_layernorm = GraniteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GraniteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, hidden_states, **input_kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, **input_kwargs)
        hidden_states = residual + hidden_states * self.residual_multiplier

        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states * self.residual_multiplier


class GraniteModel(nn.Module):
    def __init__(self, config: Granite3Config, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embedding_multiplier = config.embedding_multiplier
        self.layers = nn.ModuleList(
            [GraniteDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = GraniteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        max_len = infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
        self.rotary_emb = GraniteRotaryEmbedding(head_dim, max_len, config.rope_theta)

    def forward(self, input_ids, kv_len, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        is_prefill = forward_metadata.is_prefill
        hidden_states = self.embed_tokens(input_ids) * self.embedding_multiplier
        cos_sin = self.rotary_emb(hidden_states, q_len, kv_len, is_prefill)

        input_kwargs = {
            "bsz": bsz,
            "cos_sin": cos_sin,
            "is_prefill": is_prefill,
            "kv_len": kv_len,
            "actual_seq_lengths_kv": forward_metadata.actual_seq_lengths_kv,
            "attention_mask": forward_metadata.attention_mask,
        }
        for layer in self.layers:
            hidden_states = layer(hidden_states, **input_kwargs)
        return self.norm(hidden_states)


class GraniteForCausalLM(nn.Module):
    def __init__(self, config: Granite3Config, infer_config: InferenceConfig,
                 comm_manager: CommManager = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = GraniteModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ):
        # BSND shim: the engine packs all prompts on one axis
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids = input_ids.view(bsz, -1)
        position_ids = position_ids.view(bsz, -1)
        # prefill writes each row from offset 0, decode at the index of the new token
        kv_len = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            kv_len = torch.zeros_like(forward_metadata.actual_seq_lengths_q)

        hidden_states = self.model(input_ids, kv_len, forward_metadata)

        if hidden_states.size(1) > 1:
            gather_index, _ = torch.max(position_ids, dim=-1)
            gather_index = gather_index.unsqueeze(1).unsqueeze(2).repeat(1, 1, hidden_states.shape[-1])
            hidden_states = torch.gather(hidden_states, 1, gather_index)
        logits = self.lm_head(hidden_states)
        return logits.float() / self.config.logits_scaling

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        tied = self.config.tie_word_embeddings
        for name, loaded_weight in weights:
            if tied and name.startswith("lm_head"):
                continue
            default_weight_loader(params_dict[name], loaded_weight)
            loaded_params.add(name)
            if tied and name == "model.embed_tokens.weight":
                default_weight_loader(self.lm_head.weight, loaded_weight)
                loaded_params.add("lm_head.weight")
        return loaded_params
