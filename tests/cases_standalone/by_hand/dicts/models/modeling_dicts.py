"""Paged by hand: slots and block table travel as plain dicts, caches as one dict for each layer."""

import torch
import torch_npu
from torch import nn

from .configuration_dicts import DictsConfig


class DictsAttention(nn.Module):
    def __init__(self, config: DictsConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, caches, meta):
        query = self.q_proj(hidden_states).view(-1, self.num_heads, self.head_dim)
        key, value = self.kv_proj(hidden_states).view(-1, 2 * self.num_kv_heads, self.head_dim).chunk(2, dim=1)
        cache = caches[self.layer_idx]
        slots = meta["slot_mapping"]["full"].view(-1, 1)
        for name, fresh in (("key", key), ("value", value)):
            torch_npu.npu_scatter_nd_update_(cache[name].view(-1, self.num_kv_heads, self.head_dim), slots, fresh)
        keys, values = (cache[n].view(*cache[n].shape[:2], -1) for n in ("key", "value"))
        out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query,
            keys,
            values,
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            softmax_scale=self.head_dim**-0.5,
            input_layout="TND",
            sparse_mode=3,
            atten_mask=meta["mask"],
            actual_seq_qlen=meta["cu_q"],
            actual_seq_kvlen=meta["kv"],
            block_table=meta["block_table"]["full"],
            block_size=keys.shape[1],
        )
        return self.o_proj(out.flatten(1))


class DictsForCausalLM(nn.Module):
    def __init__(self, config: DictsConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DictsAttention(config, i) for i in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, caches, meta):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states, caches, meta)
        return self.lm_head(hidden_states)
