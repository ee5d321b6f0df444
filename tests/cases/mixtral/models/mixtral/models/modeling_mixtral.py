# coding=utf-8
# Licensed under the Apache License, Version 2.0 (the "License");
# Adapted from the HuggingFace Mixtral modeling file.
""" PyTorch Mixtral model on the executor framework."""
from typing import Callable, Dict, Iterable, Optional, Tuple

import torch
import torch.nn.functional as F
import torch_npu as npu
from torch import nn

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader
from .configuration_mixtral import MixtralConfig


class MixtralRMSNorm(nn.Module):

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class MixtralBlockSparseTop2MLP(nn.Module):

    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, hidden_states):
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))


class MixtralSparseMoeBlock(nn.Module):

    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList([MixtralBlockSparseTop2MLP(config) for _ in range(self.num_experts)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        # router_logits: (batch * sequence_length, n_experts)
        router_logits = self.gate(hidden_states)

        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)

        final_hidden_states = torch.zeros((batch_size * sequence_length, hidden_dim),
                                          dtype=hidden_states.dtype, device=hidden_states.device)
        # One hot encode the selected experts to create an expert mask
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)

        # Loop over all available experts in the model and perform the computation on each expert
        for expert_idx in range(self.num_experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class MixtralRotaryEmbedding(nn.Module):

    def __init__(self, dim, base):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids, dtype):
        freqs = position_ids[:, :, None].float() * self.inv_freq[None, None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., :x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def repeat_kv(hidden_states, n_rep):
    b, n, s, d = hidden_states.shape
    return hidden_states[:, :, None].expand(b, n, n_rep, s, d).reshape(b, n * n_rep, s, d)


def eager_attention_forward(module, query, key, value, is_prefill, scaling):
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if is_prefill:
        q_len = query.shape[2]
        causal = torch.ones(q_len, q_len, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(causal, float("-inf"))
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probs, value).transpose(1, 2).contiguous()


def sdpa_attention_forward(module, query, key, value, is_prefill, scaling):
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    attn_output = F.scaled_dot_product_attention(query, key, value, is_causal=is_prefill, scale=scaling)
    return attn_output.transpose(1, 2).contiguous()


ATTENTION_FUNCTIONS: Dict[str, Callable] = {
    "eager": eager_attention_forward,
    "sdpa": sdpa_attention_forward,
}


class MixtralAttention(nn.Module):

    def __init__(self, config: MixtralConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.k_cache = self.v_cache = torch.Tensor()
        self.cache_unit = (self.num_kv_heads * self.head_dim,)

    def forward(self, hidden_states, cos, sin, kv_len, is_prefill):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        bsz = input_shape[0]

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        # the cache may be allocated for more rows than this batch has
        past_key, past_value = self.k_cache[:bsz], self.v_cache[:bsz]
        npu.scatter_update_(past_key, kv_len, key_states.transpose(1, 2).reshape(*input_shape, -1), -2)
        npu.scatter_update_(past_value, kv_len, value_states.reshape(*input_shape, -1), -2)

        value_states = value_states.transpose(1, 2)
        if not is_prefill:
            end = kv_len.max() + 1
            key_states = past_key[:, :end].view(bsz, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)
            value_states = past_value[:, :end].view(bsz, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)

        attention_interface: Callable = eager_attention_forward
        if self.config.attn_backend != "eager":
            attention_interface = ATTENTION_FUNCTIONS[self.config.attn_backend]
        attn_output = attention_interface(self, query_states, key_states, value_states, is_prefill, self.scaling)
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output)


class MixtralDecoderLayer(nn.Module):

    def __init__(self, config: MixtralConfig, layer_idx: int):
        super().__init__()
        self.self_attn = MixtralAttention(config, layer_idx)
        self.block_sparse_moe = MixtralSparseMoeBlock(config)
        self.input_layernorm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos, sin, kv_len, is_prefill):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states, cos, sin, kv_len, is_prefill)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.block_sparse_moe(hidden_states)
        return residual + hidden_states


class MixtralModel(nn.Module):

    def __init__(self, config: MixtralConfig, infer_config: InferenceConfig):
        super().__init__()
        self.infer_config = infer_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [MixtralDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = MixtralRotaryEmbedding(
            config.head_dim or config.hidden_size // config.num_attention_heads, config.rope_theta)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        bsz = self.infer_config.scheduler_config.batch_size_per_dp_rank
        input_ids = input_ids.view(bsz, -1)
        position_ids = position_ids.view(bsz, -1)

        is_prefill = forward_metadata.is_prefill
        if is_prefill:
            kv_len = torch.zeros((bsz,), dtype=torch.int32, device=input_ids.device)
        else:
            kv_len = forward_metadata.kv_len[-bsz:].contiguous()

        hidden_states = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(position_ids, hidden_states.dtype)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, cos, sin, kv_len, is_prefill)
        return self.norm(hidden_states)


class MixtralForCausalLM(nn.Module):

    def __init__(self, config: MixtralConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.model = MixtralModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs) -> torch.Tensor:
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        # [B, S, vocab]; the engine samples from the last position
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, loaded_weight in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            default_weight_loader(params_dict[name], loaded_weight)
            loaded_params.add(name)
        return loaded_params
