# ruff: noqa  (framework style on purpose)
"""A small Paged model: grouped-query attention, full attention, sharded by heads."""

from typing import Iterable, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo


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
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def rotate(x, cos_sin):
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config, infer_config, comm_manager, layer_idx):
        super().__init__()
        self.attn_type = "FullAttention"
        self.layer_idx = layer_idx
        self.tp = infer_config.parallel_config.attn_tp_size
        self.comm_manager = comm_manager
        self.block_size = infer_config.scheduler_config.block_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // self.tp
        self.num_kv_heads = max(config.num_key_value_heads // self.tp, 1)
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
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
            )
            for name in ("k_cache", "v_cache")
        ]

    def write(self, key, value, slots):
        index = slots.view(-1, 1)
        torch_npu.npu_scatter_nd_update_(self.k_cache.view(-1, self.num_kv_heads, self.head_dim), index, key)
        torch_npu.npu_scatter_nd_update_(self.v_cache.view(-1, self.num_kv_heads, self.head_dim), index, value)

    def forward(self, hidden_states, cos_sin, forward_metadata, slot_mapping, block_table):
        tokens = hidden_states.shape[0]
        query = self.q_proj(hidden_states).view(tokens, self.num_heads, self.head_dim)
        key = self.k_proj(hidden_states).view(tokens, self.num_kv_heads, self.head_dim)
        value = self.v_proj(hidden_states).view(tokens, self.num_kv_heads, self.head_dim)
        query, key = rotate(query, cos_sin), rotate(key, cos_sin)
        slots = slot_mapping[self.attn_type]
        mask = forward_metadata.attention_mask
        q_lengths = forward_metadata.actual_seq_lengths_cu_q
        common = dict(
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            softmax_scale=self.scaling,
            input_layout="TND",
        )
        if forward_metadata.is_prefill:
            output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query,
                key,
                value,
                atten_mask=mask,
                sparse_mode=3,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=q_lengths,
                **common,
            )
            self.write(key, value, slots)
        else:
            self.write(key, value, slots)
            kv_lengths = forward_metadata.actual_seq_lengths_kv
            output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query,
                self.k_cache.view(*self.k_cache.shape[:2], -1),
                self.v_cache.view(*self.v_cache.shape[:2], -1),
                atten_mask=mask,
                sparse_mode=3,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=kv_lengths,
                block_table=block_table[self.attn_type],
                block_size=self.block_size,
                **common,
            )
        output = self.o_proj(output.reshape(tokens, -1))
        if self.tp > 1:
            dist.all_reduce(output, group=self.comm_manager.get_group("attn_tp_group"))
        return output


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, comm_manager, layer_idx):
        super().__init__()
        self.self_attn = Attention(config, infer_config, comm_manager, layer_idx)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Model(nn.Module):
    def __init__(self, config, infer_config, comm_manager):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, infer_config, comm_manager, i) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, position_ids, forward_metadata, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        position_ids = position_ids.view(-1)
        cos_sin = rotary(position_ids, self.config.head_dim, self.config.rope_theta, hidden_states.dtype)
        slot_mapping, block_table = forward_metadata.slot_mapping, forward_metadata.block_table
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                cos_sin=cos_sin,
                forward_metadata=forward_metadata,
                slot_mapping=slot_mapping,
                block_table=block_table,
            )
        hidden_states = self.norm(hidden_states)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[forward_metadata.actual_seq_lengths_cu_q - 1]
        return hidden_states.unsqueeze(1)


class GqaForCausalLM(nn.Module):
    def __init__(self, config, infer_config, comm_manager, prefix=""):
        super().__init__()
        self.comm_manager = comm_manager
        self.parallel = infer_config.parallel_config
        self.tp = self.parallel.attn_tp_size
        self.init_parallel_comm_group()
        self.model = Model(config, infer_config, comm_manager)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_parallel_comm_group(self):
        groups = self.parallel.world_size // self.tp
        self.comm_manager.register_group(name="attn_tp_group", group_num=groups, group_size=self.tp)

    def forward(self, input_ids, position_ids, forward_metadata, **kwargs):
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        return self.lm_head(hidden_states).float()

    def get_cache_info(self):
        layers = [
            LayerCacheInfo(layer_idx=i, caches=list(layer.self_attn.cache_entries))
            for i, layer in enumerate(self.model.layers)
        ]
        return ModelCacheInfo(num_layers=len(layers), layer_infos=layers)

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        parameters = dict(self.named_parameters())
        rank = self.comm_manager.get_rank("attn_tp_group")
        loaded = set()
        for name, weight in weights:
            if name not in parameters:
                continue
            axis = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}.get(name.split(".")[-2])
            if axis is not None and self.tp > 1:
                weight = weight.chunk(self.tp, dim=axis)[rank]
            parameters[name].data.copy_(weight)
            loaded.add(name)
        return loaded
