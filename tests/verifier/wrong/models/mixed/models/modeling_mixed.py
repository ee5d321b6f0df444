# ruff: noqa  (framework style on purpose)
"""A small Paged model: sliding and full layers in turn, attention sinks, a dense mixture of two experts."""

import torch
import torch_npu
from torch import nn

from executor.core.kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo

FAR = torch.iinfo(torch.int32).max


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]


def rotary(positions, dim, base, dtype):
    inverse = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions[:, None].float() * inverse
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def rotate(x, cos_sin):
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.block_size = infer_config.scheduler_config.block_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.attn_type = "SlidingWindow" if self.window is not None else "FullAttention"
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size)
        self.sinks = nn.Parameter(torch.empty(self.num_heads))
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_entries = [
            CacheEntry(
                cache_name=name,
                attn_type=self.attn_type,
                dim=self.head_dim,
                num_head=self.num_kv_heads,
                dtype=torch.bfloat16,
                needs_block=True,
                block_size=self.block_size,
                tensor_setter=lambda tensor, layer=self, name=name: setattr(layer, name, tensor),
                sliding_window=self.window,
            )
            for name in ("k_cache", "v_cache")
        ]

    def write(self, key, value, slots):
        index = slots.view(-1, 1)
        torch_npu.npu_scatter_nd_update_(self.k_cache.view(-1, self.num_kv_heads, self.head_dim), index, key)
        torch_npu.npu_scatter_nd_update_(self.v_cache.view(-1, self.num_kv_heads, self.head_dim), index, value)

    def forward(self, hidden_states, cos_sin, forward_metadata, slot_mapping, block_table):
        tokens = hidden_states.shape[0]
        query = rotate(self.q_proj(hidden_states).view(tokens, self.num_heads, self.head_dim), cos_sin)
        key = rotate(self.k_proj(hidden_states).view(tokens, self.num_kv_heads, self.head_dim), cos_sin)
        value = self.v_proj(hidden_states).view(tokens, self.num_kv_heads, self.head_dim)
        q_lengths = forward_metadata.actual_seq_lengths_cu_q
        kv_lengths = forward_metadata.actual_seq_lengths_kv
        common = dict(
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            softmax_scale=self.scaling,
            input_layout="TND",
            atten_mask=forward_metadata.attention_mask,
            next_tokens=0,
            learnable_sink=self.sinks,
        )
        slots = slot_mapping[self.attn_type]
        if forward_metadata.is_prefill:
            output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query,
                key,
                value,
                sparse_mode=4 if self.window else 3,
                pre_tokens=self.window - 1 if self.window else FAR,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=q_lengths,
                **common,
            )
            self.write(key, value, slots)
        else:
            self.write(key, value, slots)
            output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query,
                self.k_cache.view(*self.k_cache.shape[:2], -1),
                self.v_cache.view(*self.v_cache.shape[:2], -1),
                sparse_mode=4 if self.window else 3,
                pre_tokens=self.window - 1 if self.window else FAR,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=kv_lengths,
                block_table=block_table[self.attn_type],
                block_size=self.block_size,
                **common,
            )
        return self.o_proj(output.reshape(tokens, -1))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_local_experts))

    def forward(self, x):
        return torch.softmax(x @ self.weight.T + self.bias, dim=-1)


class Experts(nn.Module):
    """Both experts see every token: gate and up columns alternate, clamped SwiGLU."""

    def __init__(self, config):
        super().__init__()
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(count, inner, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))

    def forward(self, x, weights):
        out = torch.zeros_like(x)
        for i in range(self.gate_up_proj.shape[0]):
            both = x @ self.gate_up_proj[i] + self.gate_up_proj_bias[i]
            gate = both[:, ::2].clamp(max=7.0)
            up = both[:, 1::2].clamp(min=-7.0, max=7.0)
            hidden = (up + 1) * gate * torch.sigmoid(gate * 1.702)
            out = out + weights[:, i : i + 1] * (hidden @ self.down_proj[i] + self.down_proj_bias[i])
        return out


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x):
        return self.experts(x, self.router(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = Attention(config, infer_config, layer_idx)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Model(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = rotary(position_ids.view(-1), self.config.head_dim, self.config.rope_theta, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                cos_sin=cos_sin,
                forward_metadata=forward_metadata,
                slot_mapping=forward_metadata.slot_mapping,
                block_table=forward_metadata.block_table,
            )
        hidden_states = self.norm(hidden_states)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[forward_metadata.actual_seq_lengths_cu_q - 1]
        return hidden_states.unsqueeze(1)


class MixedForCausalLM(nn.Module):
    def __init__(self, config, infer_config, comm_manager, prefix=""):
        super().__init__()
        size = infer_config.parallel_config.attn_tp_size
        groups = infer_config.parallel_config.world_size // size
        comm_manager.register_group(name="attn_tp_group", group_num=groups, group_size=size)
        self.model = Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids, forward_metadata, **kwargs):
        return self.lm_head(self.model(input_ids, position_ids, forward_metadata)).float()

    def get_cache_info(self):
        layers = [
            LayerCacheInfo(layer_idx=i, caches=list(layer.self_attn.cache_entries))
            for i, layer in enumerate(self.model.layers)
        ]
        return ModelCacheInfo(num_layers=len(layers), layer_infos=layers)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name in parameters:
                parameters[name].data.copy_(weight)
                loaded.add(name)
        return loaded
