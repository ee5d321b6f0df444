# coding=utf-8
"""Persimmon 8B. The cache is a module of its own, as in small inference code bases."""

import torch
import torch.nn as nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_persimmon import PersimmonConfig


class KVCache(nn.Module):
    """Keys and values of one layer, [rows, capacity, heads, dim]."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (num_heads, head_dim)

    def update(self, start: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_prefill: bool):
        rows, length = keys.shape[:2]
        where = start[:, None] + torch.arange(length, device=keys.device)
        row = torch.arange(rows, device=keys.device)[:, None]
        self.k_cache[row, where] = keys
        self.v_cache[row, where] = values
        if is_prefill:
            return keys, values
        seen = (torch.arange(self.k_cache.shape[1], device=keys.device)[None] <= start[:, None])[..., None, None]
        return torch.where(seen, self.k_cache, 0.0), torch.where(seen, self.v_cache, 0.0)


class PersimmonAttention(nn.Module):
    def __init__(self, config: PersimmonConfig):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rotary_ndims = int(self.head_dim * config.rotary_share)
        self.query_key_value = nn.Linear(self.hidden_size, 3 * self.hidden_size, bias=True)
        self.dense = nn.Linear(self.hidden_size, self.hidden_size, bias=True)
        self.q_layernorm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
        self.k_layernorm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
        self.norm_factor = self.head_dim ** 0.5
        self.cache = KVCache(self.num_heads, self.head_dim)

    def rotate(self, x, cos, sin):
        turned, kept = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        a, b = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned, kept), dim=-1)

    def forward(self, hidden_states, cos, sin, mask, start, is_prefill):
        bsz, q_len, _ = hidden_states.size()
        fused = self.query_key_value(hidden_states).view(bsz, q_len, self.num_heads, 3, self.head_dim)
        query, key, value = fused.unbind(dim=3)
        query = self.rotate(self.q_layernorm(query), cos, sin)
        key = self.rotate(self.k_layernorm(key), cos, sin)
        keys, values = self.cache.update(start, key, value, is_prefill)

        query = query.transpose(1, 2).reshape(bsz * self.num_heads, q_len, self.head_dim)
        keys = keys.transpose(1, 2).reshape(bsz * self.num_heads, -1, self.head_dim)
        values = values.transpose(1, 2).reshape(bsz * self.num_heads, -1, self.head_dim)
        scores = torch.bmm(query, keys.transpose(1, 2)) / self.norm_factor
        scores = scores.view(bsz, self.num_heads, q_len, -1) + mask
        probs = scores.float().softmax(dim=-1).to(query.dtype).view(bsz * self.num_heads, q_len, -1)
        context = torch.bmm(probs, values).view(bsz, self.num_heads, q_len, self.head_dim)
        context = context.transpose(1, 2).contiguous().view(bsz, q_len, self.hidden_size)
        return self.dense(context)


class PersimmonMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.dense_4h_to_h(nn.functional.relu(self.dense_h_to_4h(x)).square())


class PersimmonDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = PersimmonAttention(config)
        self.mlp = PersimmonMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x, cos, sin, mask, start, is_prefill):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, start, is_prefill)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class PersimmonModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([PersimmonDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        dim = self.layers[0].self_attn.rotary_ndims
        self.register_buffer(
            "inv_freq", 1.0 / (config.rotary_base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False
        )

    def additive_mask(self, seen: torch.Tensor, dtype):
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids)
        angle = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2).unsqueeze(2)
        cos, sin = angle.cos().to(hidden_states.dtype), angle.sin().to(hidden_states.dtype)
        if forward_metadata.is_prefill:
            start = torch.zeros_like(input_ids[:, 0])
            length = input_ids.shape[1]
            seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        else:
            start = forward_metadata.kv_len
            capacity = self.layers[0].self_attn.cache.k_cache.shape[1]
            seen = (torch.arange(capacity, device=input_ids.device)[None] <= start[:, None])[:, None, None]
        mask = self.additive_mask(seen, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos, sin, mask, start, forward_metadata.is_prefill)
        return self.final_layernorm(hidden_states)


class PersimmonForCausalLM(nn.Module):
    def __init__(self, config: PersimmonConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.infer_config = infer_config
        self.batch = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = PersimmonModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids.view(self.batch, -1), position_ids.view(self.batch, -1), forward_metadata
        )
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            default_weight_loader(params_dict[name], weight)
            loaded.add(name)
        return loaded
