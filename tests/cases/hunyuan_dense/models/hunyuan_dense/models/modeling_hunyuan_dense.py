# coding=utf-8
"""Hunyuan dense. Minimal paged cache, PyTorch attention."""
import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.core.kv_cache import cache_info as kv
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_hunyuan_dense import HunYuanConfig


class HunYuanRMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]


class HunYuanRotary(nn.Module):
    def __init__(self, config: HunYuanConfig):
        super().__init__()
        dim = config.head_dim
        # NTK-aware: a fixed alpha stretches the base
        base = config.rope_base * config.rope_alpha ** (dim / (dim - 2))
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids, dtype):
        freqs = torch.outer(position_ids.float(), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)[:, None]
        return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class HunYuanAttention(nn.Module):
    attn_type = "FullAttention"

    def __init__(self, config: HunYuanConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // attn_tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // attn_tp_size, 1)
        self.softmax_scale = self.head_dim ** -0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=bias)
        self.query_layernorm = HunYuanRMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = HunYuanRMSNorm(self.head_dim, config.rms_norm_eps)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        on_entry = {}
        if "block_size" in kv.CacheEntry.__dataclass_fields__:
            on_entry["block_size"] = infer_config.scheduler_config.block_size
        self.cache_entries = []
        for name in ("k_cache", "v_cache"):
            self.cache_entries.append(kv.CacheEntry(
                cache_name=name,
                attn_type=self.attn_type,
                dim=self.head_dim,
                num_head=self.num_kv_heads_per_rank,
                dtype=self.o_proj.weight.dtype,
                needs_block=True,
                tensor_setter=lambda tensor, attr=name: setattr(self, attr, tensor),
                **on_entry,
            ))

    def update_cache(self, slot_mapping, key_states, value_states):
        indices = slot_mapping[self.attn_type].view(-1, 1)
        unit = (self.num_kv_heads_per_rank, self.head_dim)
        torch_npu.npu_scatter_nd_update_(self.k_cache.view(-1, *unit), indices, key_states.reshape(-1, *unit))
        torch_npu.npu_scatter_nd_update_(self.v_cache.view(-1, *unit), indices, value_states.reshape(-1, *unit))

    def forward(self, hidden_states, cos_sin, forward_metadata: ForwardMetaData, slot_mapping=None, block_table=None):
        num_tokens = hidden_states.shape[0]
        q = self.q_proj(hidden_states).view(num_tokens, self.num_heads_per_rank, self.head_dim)
        k = self.k_proj(hidden_states).view(num_tokens, self.num_kv_heads_per_rank, self.head_dim)
        v = self.v_proj(hidden_states).view(num_tokens, self.num_kv_heads_per_rank, self.head_dim)

        q = self.query_layernorm(rotate(q, *cos_sin))
        k = self.key_layernorm(rotate(k, *cos_sin))
        self.update_cache(slot_mapping, k, v)

        if forward_metadata.is_prefill:
            # every prompt sees only itself
            index = torch.arange(num_tokens, device=q.device)
            request = torch.bucketize(index, forward_metadata.actual_seq_lengths_cu_q, right=True)
            keep = (request[:, None] == request[None, :]) & (index[:, None] >= index[None, :])
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                attn_mask=keep[None, None], scale=self.softmax_scale, enable_gqa=True)
            out = out[0].transpose(0, 1)
        else:
            # [B, width, bs, N, D] -> [B, width * bs, N, D]; tail blocks belong to nobody
            table = block_table[self.attn_type].long()
            past_k = self.k_cache[table].flatten(1, 2)
            past_v = self.v_cache[table].flatten(1, 2)
            kv_pos = torch.arange(past_k.shape[1], device=q.device)
            keep = kv_pos[None] < forward_metadata.actual_seq_lengths_kv[:, None]
            past_k = past_k.masked_fill(~keep[:, :, None, None], 0)
            past_v = past_v.masked_fill(~keep[:, :, None, None], 0)
            out = F.scaled_dot_product_attention(
                q[:, :, None], past_k.transpose(1, 2), past_v.transpose(1, 2),
                attn_mask=keep[:, None, None], scale=self.softmax_scale, enable_gqa=True)
            out = out.squeeze(2)
        return self.o_proj(out.reshape(num_tokens, -1))


class HunYuanMLP(nn.Module):
    def __init__(self, config: HunYuanConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HunYuanDecoderLayer(nn.Module):
    def __init__(self, config: HunYuanConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = HunYuanAttention(config, infer_config, layer_idx)
        self.mlp = HunYuanMLP(config)
        self.input_layernorm = HunYuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = HunYuanRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, forward_metadata, **kwargs):
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), cos_sin, forward_metadata, **kwargs)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HunYuanModel(nn.Module):
    def __init__(self, config: HunYuanConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            HunYuanDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers))
        self.norm = HunYuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = HunYuanRotary(config)

    def forward(self, input_ids, position_ids, forward_metadata, slot_mapping, block_table):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(position_ids, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, cos_sin, forward_metadata, slot_mapping=slot_mapping, block_table=block_table)
        return self.norm(hidden_states)


class HunYuanDenseForCausalLM(nn.Module):
    def __init__(self, config: HunYuanConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.block_size = infer_config.scheduler_config.block_size
        self.init_parallel_comm_group()
        self.model = HunYuanModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_parallel_comm_group(self):
        register = getattr(self.comm_manager, "register_group", None)
        if register is None:
            return  # the manager of this executor makes the groups itself
        cfg = self.infer_config.parallel_config
        register(name="attn_tp_group", group_num=cfg.world_size // cfg.attn_tp_size, group_size=cfg.attn_tp_size)

    def get_cache_info(self):
        layer_infos = [
            kv.LayerCacheInfo(layer_idx=i, caches=list(layer.self_attn.cache_entries))
            for i, layer in enumerate(self.model.layers)
        ]
        fields = {"num_layers": len(layer_infos), "layer_infos": layer_infos}
        if "block_size" in kv.ModelCacheInfo.__dataclass_fields__:
            fields["block_size"] = self.block_size
        return kv.ModelCacheInfo(**fields)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids,
            position_ids,
            forward_metadata,
            slot_mapping=forward_metadata.slot_mapping,
            block_table=forward_metadata.block_table,
        )
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[forward_metadata.actual_seq_lengths_cu_q - 1]
        logits = self.lm_head(hidden_states[:, None])
        return logits.float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
