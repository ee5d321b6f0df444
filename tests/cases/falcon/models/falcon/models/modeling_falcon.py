# coding=utf-8
"""Falcon-7B on the paged executor.

The KV cache is paged (entries, slot mapping, block table); attention is still plain SDPA, one request at a time.
Fused attention comes later.
"""
from typing import Iterable, List, Optional, Set, Tuple

import torch
import torch_npu
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.core.kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_falcon import RWConfig

# June 2026 moved block_size from the model to the entries
BLOCK_SIZE_ON_ENTRY = "block_size" in CacheEntry.__dataclass_fields__


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class FalconRotaryEmbedding(nn.Module):
    def __init__(self, head_dim: int, base: float):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype):
        """[T] -> two [T, 1, D]"""
        freqs = position_ids.float().unsqueeze(-1) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1).unsqueeze(1)
        return emb.cos().to(dtype), emb.sin().to(dtype)


class FalconAttention(nn.Module):
    def __init__(self, config: RWConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_kv_heads_per_rank = 1  # multi-query
        self.head_dim = config.head_dim
        self.inv_norm_factor = self.head_dim ** -0.5
        self.query_key_value = nn.Linear(
            self.hidden_size, self.hidden_size + 2 * self.num_kv_heads_per_rank * self.head_dim, bias=config.bias
        )
        self.dense = nn.Linear(self.hidden_size, self.hidden_size, bias=config.bias)

        self.attn_type = "FullAttention"
        self.block_size = infer_config.scheduler_config.block_size
        # placeholders, the executor injects the pools
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        cache_dtype = self.dense.weight.dtype
        extra = {"block_size": self.block_size} if BLOCK_SIZE_ON_ENTRY else {}
        self.cache_entries = [
            CacheEntry(
                cache_name="k_cache",
                attn_type=self.attn_type,
                dim=self.head_dim,
                num_head=self.num_kv_heads_per_rank,
                dtype=cache_dtype,
                needs_block=True,
                tensor_setter=lambda t, layer=self: setattr(layer, "k_cache", t),
                **extra,
            ),
            CacheEntry(
                cache_name="v_cache",
                attn_type=self.attn_type,
                dim=self.head_dim,
                num_head=self.num_kv_heads_per_rank,
                dtype=cache_dtype,
                needs_block=True,
                tensor_setter=lambda t, layer=self: setattr(layer, "v_cache", t),
                **extra,
            ),
        ]

    def _split_heads(self, fused_qkv: torch.Tensor):
        # [T, (N + 2) * D]: all query heads, then the key head, then the value head
        fused_qkv = fused_qkv.view(fused_qkv.shape[0], self.num_heads + 2, self.head_dim)
        return fused_qkv[:, :-2], fused_qkv[:, [-2]], fused_qkv[:, [-1]]

    def _sdpa(self, query, key, value, is_causal):
        # [S, N, D] -> [1, N, S, D]
        query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        key = key.expand(-1, self.num_heads, -1, -1)
        value = value.expand(-1, self.num_heads, -1, -1)
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=self.inv_norm_factor
        )
        return output.squeeze(0).transpose(0, 1)

    def _gather(self, cache: torch.Tensor, block_row: torch.Tensor, length: int):
        """Tokens 0..length-1 of one request: [length, N, D]."""
        used = (length + self.block_size - 1) // self.block_size
        return cache[block_row[:used].long()].flatten(0, 1)[:length]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        slot_mapping = forward_metadata.slot_mapping[self.attn_type]
        block_table = forward_metadata.block_table[self.attn_type]

        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        cos, sin = position_embeddings
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        torch_npu.npu_scatter_nd_update_(
            self.k_cache.view(-1, self.num_kv_heads_per_rank, self.head_dim),
            slot_mapping.view(-1, 1),
            key.view(-1, self.num_kv_heads_per_rank, self.head_dim),
        )
        torch_npu.npu_scatter_nd_update_(
            self.v_cache.view(-1, self.num_kv_heads_per_rank, self.head_dim),
            slot_mapping.view(-1, 1),
            value.view(-1, self.num_kv_heads_per_rank, self.head_dim),
        )

        outputs: List[torch.Tensor] = []
        ends = forward_metadata.actual_seq_lengths_cu_q.tolist()
        if forward_metadata.is_prefill:
            start = 0
            for end in ends:
                outputs.append(self._sdpa(query[start:end], key[start:end], value[start:end], is_causal=True))
                start = end
        else:
            lengths = forward_metadata.actual_seq_lengths_kv.tolist()
            for row, length in enumerate(lengths):
                keys = self._gather(self.k_cache, block_table[row], length)
                values = self._gather(self.v_cache, block_table[row], length)
                outputs.append(self._sdpa(query[row : row + 1], keys, values, is_causal=False))
        attn_output = torch.cat(outputs, dim=0).reshape(-1, self.hidden_size)
        return self.dense(attn_output)


class FalconMLP(nn.Module):
    def __init__(self, config: RWConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=config.bias)
        self.act = nn.GELU()
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x):
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class FalconDecoderLayer(nn.Module):
    def __init__(self, config: RWConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attention = FalconAttention(config, infer_config, layer_idx)
        self.mlp = FalconMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, hidden_states, position_embeddings, forward_metadata):
        residual = hidden_states
        layernorm_out = self.input_layernorm(hidden_states)
        attention_output = self.self_attention(layernorm_out, position_embeddings, forward_metadata)
        mlp_output = self.mlp(layernorm_out)
        mlp_output += attention_output
        return residual + mlp_output


class FalconModel(nn.Module):
    def __init__(self, config: RWConfig, infer_config: InferenceConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList([FalconDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.rotary_emb = FalconRotaryEmbedding(config.head_dim, config.rope_theta)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.word_embeddings(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)
        for block in self.h:
            hidden_states = block(hidden_states, position_embeddings, forward_metadata)
        return self.ln_f(hidden_states)


class FalconForCausalLM(nn.Module):
    def __init__(
        self,
        config: RWConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.block_size = infer_config.scheduler_config.block_size
        if hasattr(comm_manager, "register_group"):
            parallel = infer_config.parallel_config
            comm_manager.register_group(
                name="attn_tp_group", group_num=parallel.attn_dp_size, group_size=parallel.attn_tp_size
            )
        self.transformer = FalconModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = self.transformer(input_ids, position_ids, forward_metadata)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states.index_select(0, forward_metadata.actual_seq_lengths_cu_q - 1)
        # one row per request
        return self.lm_head(hidden_states).float().unsqueeze(1)

    def get_cache_info(self) -> ModelCacheInfo:
        layer_infos = []
        for layer_idx, layer in enumerate(self.transformer.h):
            layer_infos.append(LayerCacheInfo(layer_idx=layer_idx, caches=list(layer.self_attention.cache_entries)))
        extra = {} if BLOCK_SIZE_ON_ENTRY else {"block_size": self.block_size}
        return ModelCacheInfo(num_layers=len(layer_infos), layer_infos=layer_infos, **extra)

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        params_dict = dict(self.named_parameters())
        loaded: Set[str] = set()
        for name, tensor in weights:
            if name == "lm_head.weight":
                continue
            default_weight_loader(params_dict[name], tensor)
            loaded.add(name)
            if name == "transformer.word_embeddings.weight":
                default_weight_loader(self.lm_head.weight, tensor)
                loaded.add("lm_head.weight")
        return loaded
