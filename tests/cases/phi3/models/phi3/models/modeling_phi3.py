# coding=utf-8
# Copyright 2024 Microsoft and the HuggingFace Inc. team. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the 'License');
# you may not use this file except in compliance with the License.
#
# Modified: training code removed, static KV cache in [batch, heads, max_len, head_dim].
import torch
from torch import nn
from torch.nn import functional as F
from torch_npu import scatter_update_

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader
from .configuration_phi3 import Phi3Config


class Phi3RMSNorm(nn.Module):
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


class Phi3RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer('inv_freq', inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        freqs = (inv_freq_expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)


class Phi3MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class Phi3SdpaAttention(nn.Module):
    '''SDPA over [B, N, S, D]; all layers share one sliding window.'''

    def __init__(self, config: Phi3Config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.sliding_window = config.sliding_window

        op_size = self.num_heads * self.head_dim + 2 * (self.num_key_value_heads * self.head_dim)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.qkv_proj = nn.Linear(config.hidden_size, op_size, bias=False)

        # allocated in Phi3ForCausalLM.init_cache
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])

    def forward(self, hidden_states, position_ids, position_embeddings, cache_start, is_prefill):
        bsz, q_len, _ = hidden_states.size()

        qkv = self.qkv_proj(hidden_states)
        query_pos = self.num_heads * self.head_dim
        query_states = qkv[..., :query_pos]
        key_states = qkv[..., query_pos: query_pos + self.num_key_value_heads * self.head_dim]
        value_states = qkv[..., query_pos + self.num_key_value_heads * self.head_dim:]

        query_states = query_states.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key_states = key_states.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value_states = value_states.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)

        cos, sin = position_embeddings
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query_states = (query_states * cos) + (rotate_half(query_states) * sin)
        key_states = (key_states * cos) + (rotate_half(key_states) * sin)

        # cache axis -2 is the sequence
        scatter_update_(self.k_cache, cache_start, key_states, -2)
        scatter_update_(self.v_cache, cache_start, value_states, -2)

        if is_prefill:
            visible = torch.ones(q_len, q_len, dtype=torch.bool, device=qkv.device).tril()
            if self.sliding_window is not None:
                visible = visible.triu(1 - self.sliding_window)
        else:
            kv_seq_len = int(cache_start.max()) + 1
            key_states = self.k_cache[:, :, :kv_seq_len, :]
            value_states = self.v_cache[:, :, :kv_seq_len, :]
            kv_pos = torch.arange(kv_seq_len, device=qkv.device)
            visible = kv_pos[None, None, None, :] <= position_ids[:, None, :, None]
            if self.sliding_window is not None:
                visible = visible & (position_ids[:, None, :, None] - kv_pos < self.sliding_window)

        attn_output = F.scaled_dot_product_attention(query_states, key_states, value_states, attn_mask=visible)

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(bsz, q_len, self.num_heads * self.head_dim)
        return self.o_proj(attn_output)


class Phi3DecoderLayer(nn.Module):
    def __init__(self, config: Phi3Config, layer_idx):
        super().__init__()
        self.self_attn = Phi3SdpaAttention(config, layer_idx=layer_idx)
        self.mlp = Phi3MLP(config)
        self.input_layernorm = Phi3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.resid_attn_dropout = nn.Dropout(config.resid_pdrop)
        self.resid_mlp_dropout = nn.Dropout(config.resid_pdrop)
        self.post_attention_layernorm = Phi3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_ids, position_embeddings, cache_start, is_prefill):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        attn_outputs = self.self_attn(
            hidden_states,
            position_ids,
            position_embeddings,
            cache_start,
            is_prefill,
        )
        hidden_states = residual + self.resid_attn_dropout(attn_outputs)

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + self.resid_mlp_dropout(hidden_states)
        return hidden_states


class Phi3Model(nn.Module):
    def __init__(self, config: Phi3Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_dropout = nn.Dropout(config.embd_pdrop)
        self.layers = nn.ModuleList(
            [Phi3DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Phi3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Phi3RotaryEmbedding(config.hidden_size // config.num_attention_heads, config.rope_theta)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_dropout(self.embed_tokens(input_ids))
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        is_prefill = forward_metadata.is_prefill
        cache_start = forward_metadata.kv_len
        if is_prefill:
            cache_start = position_ids.new_zeros(position_ids.size(0))
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states, position_ids, position_embeddings, cache_start, is_prefill
            )
        hidden_states = self.norm(hidden_states)
        return hidden_states


class Phi3ForCausalLM(nn.Module):
    def __init__(self, config, infer_config: InferenceConfig, comm_manager: CommManager = None, prefix=''):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.max_cache_len = infer_config.data_config.input_truncated_len \
            + infer_config.scheduler_config.max_new_tokens
        self.model = Phi3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        '''Called by the framework instead of its own allocation.'''
        dtype = self.lm_head.weight.dtype
        for layer in self.model.layers:
            attn = layer.self_attn
            shape = (self.batch_size, attn.num_key_value_heads, self.max_cache_len, attn.head_dim)
            attn.k_cache = torch.zeros(shape, dtype=dtype, device=device)
            attn.v_cache = torch.zeros(shape, dtype=dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, **kwargs):
        input_ids = torch.reshape(input_ids, (self.batch_size, -1))
        position_ids = torch.reshape(position_ids, (self.batch_size, -1))

        hidden_states = self.model(input_ids, position_ids, forward_metadata)
        # lm_head on the last position only
        q_len = hidden_states.shape[1]
        hidden_states = torch.narrow(hidden_states, 1, q_len - 1, 1)
        logits = self.lm_head(hidden_states)
        return logits.float()

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], weight)
            loaded.add(name)
        return loaded
