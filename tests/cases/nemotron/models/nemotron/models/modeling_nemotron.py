# coding=utf-8
'''Nemotron / Minitron. The caches live in one tuple on the top-level model.'''

import math

import torch
import torch_npu as npu
from torch import nn
import torch.nn.functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_nemotron import MinitronConfig


class LayerNorm1P(nn.LayerNorm):
    '''weights are stored around zero'''

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class MinitronRotary(nn.Module):

    def __init__(self, config: MinitronConfig):
        super().__init__()
        self.dim = int(config.head_dim * config.partial_rotary_factor)
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, self.dim, 2).float() / self.dim))
        self.register_buffer('inv_freq', inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, position_ids, dtype):
        freqs = position_ids.unsqueeze(-1).float() @ self.inv_freq.unsqueeze(0)
        emb = torch.cat((freqs, freqs), dim=-1).unsqueeze(2)
        return emb.cos().to(dtype), emb.sin().to(dtype)


def partial_rope(x, cos, sin):
    rotary_dim = cos.shape[-1]
    rot, keep = torch.split(x, [rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    half = torch.cat((-rot[..., rotary_dim // 2:], rot[..., :rotary_dim // 2]), dim=-1)
    return torch.cat((rot * cos + half * sin, keep), dim=-1)


class MinitronAttention(nn.Module):

    def __init__(self, config: MinitronConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim,
                                bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim,
                                bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, x, rope, caches, write_pos, kv_total, prefill):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_key_value_heads, self.head_dim)
        v = self.v_proj(x)

        q = partial_rope(q, *rope) / math.sqrt(self.head_dim)
        k = partial_rope(k, *rope)

        k_cache = caches[self.layer_idx][0]
        v_cache = caches[self.layer_idx][1]
        npu.scatter_update_(k_cache, write_pos, k.reshape(b, s, -1), -2)
        npu.scatter_update_(v_cache, write_pos, v, -2)

        # [B, S, N * D] -> [B, N, S, D] with every kv head repeated
        keys = k_cache[:, :kv_total].unflatten(-1, (self.num_key_value_heads, self.head_dim)).transpose(1, 2)
        values = v_cache[:, :kv_total].unflatten(-1, (self.num_key_value_heads, self.head_dim)).transpose(1, 2)
        keys = keys.repeat_interleave(self.num_key_value_groups, dim=1)
        values = values.repeat_interleave(self.num_key_value_groups, dim=1)

        o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=prefill, scale=1.0)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class MinitronMLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)) ** 2)


class MinitronDecoderLayer(nn.Module):

    def __init__(self, config: MinitronConfig, layer_idx: int):
        super().__init__()
        self.self_attn = MinitronAttention(config, layer_idx)
        self.mlp = MinitronMLP(config)
        self.input_layernorm = LayerNorm1P(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = LayerNorm1P(config.hidden_size, eps=config.norm_eps)

    def forward(self, hidden_states, position_embeddings, past_key_values, kv_len, kv_seq_len, is_prefill):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, past_key_values, kv_len, kv_seq_len, is_prefill)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MinitronModel(nn.Module):

    def __init__(self, config: MinitronConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([MinitronDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LayerNorm1P(config.hidden_size, eps=config.norm_eps)
        self.rotary_emb = MinitronRotary(config)

    def forward(self, input_ids, position_ids, past_key_values, forward_metadata):
        is_prefill = forward_metadata.is_prefill
        if is_prefill:
            kv_len = torch.zeros(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
            kv_seq_len = input_ids.shape[1]
        else:
            kv_len = forward_metadata.kv_len
            kv_seq_len = int(forward_metadata.actual_seq_lengths_kv.max())
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, past_key_values, kv_len, kv_seq_len, is_prefill)
        return self.norm(hidden_states)


class NemotronForCausalLM(nn.Module):

    def __init__(self, config: MinitronConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ''):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = MinitronModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.past_key_values = None

    def init_cache(self, device):
        max_len = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        width = self.config.num_key_value_heads * self.config.head_dim
        caches = []
        for _ in range(self.config.num_hidden_layers):
            k_cache = torch.zeros(self.batch_size, max_len, width, dtype=self.lm_head.weight.dtype, device=device)
            v_cache = torch.zeros(self.batch_size, max_len, width, dtype=self.lm_head.weight.dtype, device=device)
            caches.append((k_cache, v_cache))
        self.past_key_values = tuple(caches)

    @torch.no_grad()
    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        # packed -> [B, S]
        input_ids = input_ids.reshape(self.batch_size, -1)
        position_ids = position_ids.reshape(self.batch_size, -1)
        if self.past_key_values is None:
            raise RuntimeError('init_cache was not called')
        hidden_states = self.model(input_ids, position_ids, self.past_key_values, forward_metadata)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[:, -1:]
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
