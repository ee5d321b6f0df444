# ruff: noqa  (framework style on purpose)
"""A small Paged model: multi-head latent attention, expanded prefill, absorbed decode over an NZ cache."""

import math

import torch
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


def yarn_frequencies(config):
    """Inverse frequencies: interpolated where a full turn is longer than the original context."""
    dim, base, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def turns(count):
        length = yarn["original_max_position_embeddings"]
        return dim * math.log(length / (count * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(turns(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / yarn["factor"] * ramp + plain * (1 - ramp)


def mscale(factor, value):
    return 0.1 * value * math.log(factor) + 1.0


def rotate_interleaved(x, cos, sin):
    """Pairs (2i, 2i+1) come out as halves: what the fused operators do."""
    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_type = "FullAttention"
        self.block_size = infer_config.scheduler_config.block_size
        self.num_heads = config.num_attention_heads
        self.rank, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope_dim, self.v_dim = config.qk_nope_head_dim, config.v_head_dim
        self.q_dim = self.nope_dim + self.rope_dim
        yarn = config.yarn
        self.scaling = self.q_dim**-0.5
        self.scaling *= mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, config.hidden_size, bias=False)
        self.nope_cache = torch.Tensor([])
        self.rope_cache = torch.Tensor([])
        self.cache_entries = [
            CacheEntry(
                cache_name=name,
                attn_type=self.attn_type,
                dim=dim,
                num_head=1,
                dtype=torch.bfloat16,
                needs_block=True,
                block_size=self.block_size,
                tensor_setter=lambda tensor, layer=self, name=name: setattr(layer, name, tensor),
            )
            for name, dim in (("nope_cache", self.rank), ("rope_cache", self.rope_dim))
        ]

    def nz(self, cache):
        blocks, size, _, dim = cache.shape
        return cache.view(blocks, 1, dim // 16, size, 16)

    def forward(self, hidden_states, cos_sin, forward_metadata, slot_mapping, block_table):
        tokens = hidden_states.shape[0]
        cos, sin = cos_sin
        q_nope, q_rope = self.q_proj(hidden_states).view(tokens, self.num_heads, -1).split(
            (self.nope_dim, self.rope_dim), dim=-1
        )
        q_rope = rotate_interleaved(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        latent = self.kv_a_proj_with_mqa(hidden_states)
        _, _, k_rope, k_nope = torch_npu.npu_kv_rmsnorm_rope_cache(
            latent.view(tokens, 1, 1, -1),
            self.kv_a_layernorm.weight,
            cos.view(tokens, 1, 1, -1),
            sin.view(tokens, 1, 1, -1),
            slot_mapping[self.attn_type].view(-1),
            self.rope_cache,
            self.nope_cache,
            epsilon=self.kv_a_layernorm.eps,
            cache_mode="PA_NZ",
            is_output_kv=True,
        )
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.rank)
        to_key, to_value = weight[:, : self.nope_dim], weight[:, self.nope_dim :]
        q_lengths = forward_metadata.actual_seq_lengths_cu_q
        if forward_metadata.is_prefill:
            k_nope, k_rope = k_nope.view(tokens, self.rank), k_rope.view(tokens, 1, self.rope_dim)
            key = torch.einsum("tr,hdr->htd", k_nope, to_key)
            value = torch.einsum("tr,hdr->htd", k_nope, to_value)
            output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                q_nope.transpose(0, 1).contiguous(),
                key.contiguous(),
                value.contiguous(),
                query_rope=q_rope.transpose(0, 1).contiguous(),
                key_rope=k_rope.expand(-1, self.num_heads, -1).transpose(0, 1).contiguous(),
                num_query_heads=self.num_heads,
                num_key_value_heads=self.num_heads,
                softmax_scale=self.scaling,
                input_layout="NTD_TND",
                sparse_mode=3,
                atten_mask=forward_metadata.attention_mask,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=q_lengths,
            )
        else:
            absorbed = torch.einsum("thd,hdr->thr", q_nope, to_key)
            latent_out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                absorbed.contiguous(),
                self.nz(self.nope_cache),
                self.nz(self.nope_cache),
                query_rope=q_rope.contiguous(),
                key_rope=self.nz(self.rope_cache),
                num_query_heads=self.num_heads,
                num_key_value_heads=1,
                softmax_scale=self.scaling,
                input_layout="TND_NTD",
                sparse_mode=0,
                atten_mask=None,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=forward_metadata.actual_seq_lengths_kv,
                block_table=block_table[self.attn_type],
                block_size=self.block_size,
            )
            output = torch.einsum("htr,hdr->thd", latent_out, to_value)
        return self.o_proj(output.reshape(tokens, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("inverse", yarn_frequencies(config), persistent=False)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.embed_tokens(input_ids)
        angles = position_ids.view(-1, 1).float() * self.inverse.float()
        angles = torch.cat((angles, angles), dim=-1)
        cos_sin = (angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype))
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


class MlaForCausalLM(nn.Module):
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
        return ModelCacheInfo(num_layers=len(layers), layer_infos=layers, is_mla_backend=True)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name in parameters:
                parameters[name].data.copy_(weight)
                loaded.add(name)
        return loaded
