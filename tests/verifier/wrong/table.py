"""Deliberately wrong rewrites of the models beside this file, each from a failure seen in the field.

A row replaces text in a model that passes. `expect` names what must be reported; `refused` rows would be refused by
the device or crash there (only then may the run end early), all others run to their end.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """One wrong rewrite. `edits`: (old, new, how often old must occur). `repeat`: run the repetitions as well."""

    name: str
    model: str
    edits: tuple[tuple[str, str, int], ...]
    expect: frozenset[str]
    refused: bool = False
    repeat: bool = False
    tp: int = 1


def row(name: str, model: str, expect: str, *edits: tuple[str, str] | tuple[str, str, int], **kwargs: object) -> Row:
    full = tuple((e[0], e[1], e[2] if len(e) == 3 else 1) for e in edits)
    return Row(name, model, full, frozenset(expect.split()), **kwargs)  # type: ignore[arg-type]


CAUSAL = """                atten_mask=mask,
                sparse_mode=3,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=q_lengths,
"""
BLIND = """                atten_mask=None,
                sparse_mode=0,
                actual_seq_qlen=q_lengths,
                actual_seq_kvlen=q_lengths,
"""
KV = "kv_lengths = forward_metadata.actual_seq_lengths_kv"
TABLES = "slot_mapping, block_table = forward_metadata.slot_mapping, forward_metadata.block_table"
POSITIONS = "position_ids = position_ids.view(-1)\n"
PRE = "pre_tokens=self.window - 1 if self.window else FAR"
MODE = "sparse_mode=4 if self.window else 3"
DECODE_LENGTHS = "                actual_seq_qlen=q_lengths,\n                actual_seq_kvlen=kv_lengths,"
PLACEHOLDERS = "        self.k_cache = torch.Tensor([])\n        self.v_cache = torch.Tensor([])\n"

GQA = (
    row("mask missing in prefill", "gqa", "KV400", (CAUSAL, BLIND)),
    row("mask inverted", "gqa", "KV450", ("mask = forward_metadata.att", "mask = ~forward_metadata.att")),
    row(
        "slot off by one",
        "gqa",
        "KV401",
        (
            "index = slots.view(-1, 1)",
            "index = (slots - slots % self.block_size + (slots + 1) % self.block_size).view(-1, 1)",
        ),
    ),
    row(
        "stale block table",
        "gqa",
        "KV401",
        (
            TABLES,
            TABLES + "\n        self.kept = None if forward_metadata.is_prefill else getattr(self, 'kept', None) or "
            "block_table\n        block_table = self.kept or block_table",
        ),
    ),
    row("key length without the new token", "gqa", "KV400 KV405", (KV, f"kv_lengths = ({KV[13:]} - 1).clamp(min=1)")),
    row("cumulative key lengths with a block table", "gqa", "KV401 KV405", (KV, KV.replace("_kv", "_cu_kv"))),
    row(
        "longest key length for every row",
        "gqa",
        "KV401 KV405",
        (KV, f"{KV}\n            kv_lengths = kv_lengths * 0 + kv_lengths.max()"),
    ),
    row(
        "query lengths not cumulative",
        "gqa",
        "KV451",
        ("q_lengths = forward_metadata.actual_seq_lengths_cu_q", "q_lengths = forward_metadata.actual_seq_lengths_q"),
        refused=True,
    ),
    row(
        "block ids assumed to be in order",
        "gqa",
        "KV401",
        (
            "block_table=block_table[self.attn_type]",
            "block_table=torch.arange(block_table[self.attn_type].numel(), dtype=torch.int32)"
            ".view_as(block_table[self.attn_type])",
        ),
    ),
    row(
        "K and V swapped at the write",
        "gqa",
        "KV400",
        ("            self.write(key, value, slots)\n", "            self.write(value, key, slots)\n", 2),
    ),
    row(
        "GQA repeat left in, heads in the wrong order",
        "gqa",
        "KV400",
        ("num_head=self.num_kv_heads", "num_head=self.num_heads"),
        ("cache.view(-1, self.num_kv_heads, self", "cache.view(-1, self.num_heads, self", 2),
        ("num_key_value_heads=self.num_kv_heads", "num_key_value_heads=self.num_heads"),
        (
            "        slots = slot_mapping[",
            "        groups = self.num_heads // self.num_kv_heads\n"
            "        key, value = key.repeat(1, groups, 1), value.repeat(1, groups, 1)\n"
            "        slots = slot_mapping[",
        ),
    ),
    row(
        "decode positions off by one",
        "gqa",
        "KV400",
        (POSITIONS, "position_ids = position_ids.view(-1) + (0 if forward_metadata.is_prefill else 1)\n"),
    ),
    row("scale left out", "gqa", "KV400 KV418", ("            softmax_scale=self.scaling,\n", "")),
    row("scale of the hidden size", "gqa", "KV400 KV418", ("self.head_dim**-0.5", "config.hidden_size**-0.5")),
    row(
        "last token of another request",
        "gqa",
        "KV400",
        ("actual_seq_lengths_cu_q - 1]", "actual_seq_lengths_cu_q.roll(1) - 1]"),
    ),
    row(
        "prefill logits of every token",
        "gqa",
        "KV414",
        (
            "        if forward_metadata.is_prefill:\n"
            "            hidden_states = hidden_states[forward_metadata.actual_seq_lengths_cu_q - 1]\n",
            "",
        ),
    ),
    row(
        "4-D cache passed as it is",
        "gqa",
        "KV453",
        ("self.k_cache.view(*self.k_cache.shape[:2], -1)", "self.k_cache"),
        ("self.v_cache.view(*self.v_cache.shape[:2], -1)", "self.v_cache"),
        refused=True,
    ),
    row(
        "all layers share one cache",
        "gqa",
        "KV400 KV411",
        (PLACEHOLDERS, ""),
        ("name=name: setattr(layer, name, tensor)", "name=name: setattr(type(layer), name, tensor)"),
    ),
    row(
        "setter bound late",
        "gqa",
        "KV411",
        ("lambda tensor, layer=self, name=name:", "lambda tensor, layer=self:"),
        refused=True,
    ),
    row(
        "attn_tp_group never registered",
        "gqa",
        "KV420",
        ("        self.init_parallel_comm_group()\n", ""),
        ('rank = self.comm_manager.get_rank("attn_tp_group")', "rank = 0"),
        refused=True,
    ),
    row(
        "positions remembered by batch row",
        "gqa",
        "KV417",
        (
            POSITIONS,
            POSITIONS + "        if forward_metadata.is_prefill:\n"
            "            self.lengths = forward_metadata.actual_seq_lengths_kv.clone()\n"
            "        else:\n"
            "            position_ids = position_ids.clone()\n"
            "            position_ids[: len(self.lengths)] = self.lengths\n"
            "            self.lengths = self.lengths + 1\n",
        ),
        repeat=True,
    ),
    row(
        "dynamic rotary that remembers the longest request",
        "gqa",
        "KV416",
        (
            POSITIONS,
            POSITIONS + "        longest = getattr(self, 'longest', 0)\n"
            "        self.longest = max(longest, int(position_ids.max()))\n"
            "        theta = self.config.rope_theta * (2.0 if longest >= 34 else 1.0)\n",
        ),
        ("self.config.rope_theta, hidden", "theta, hidden"),
        repeat=True,
    ),
    row(
        "kv heads not divided by the ranks",
        "gqa",
        "KV453",
        (
            "num_key_value_heads=self.num_kv_heads",
            "num_key_value_heads=self.num_kv_heads * self.tp",
        ),
        refused=True,
        tp=2,
    ),
    row(
        "attention output not reduced over the ranks",
        "gqa",
        "KV400 KV422",
        (
            "        if self.tp > 1:\n            dist.all_reduce",
            "        if self.tp > 2:\n            dist.all_reduce",
        ),
        tp=2,
    ),
    row(
        "every rank loads the first shard",
        "gqa",
        "KV400",
        ("weight.chunk(self.tp, dim=axis)[rank]", "weight.chunk(self.tp, dim=axis)[0]"),
        tp=2,
    ),
)

MIXED = (
    row("window off by one", "mixed", "KV402 KV403", (PRE, PRE.replace(" - 1", ""), 2)),
    row(
        "window dropped on decode",
        "mixed",
        "KV402",
        (
            f"                {MODE},\n                {PRE},\n{DECODE_LENGTHS}",
            f"                sparse_mode=3,\n                pre_tokens=FAR,\n{DECODE_LENGTHS}",
        ),
    ),
    row("window given to a mode that ignores it", "mixed", "KV402", (MODE, "sparse_mode=3", 2)),
    row("window one short", "mixed", "KV402", (PRE, PRE.replace(" - 1", " - 2"), 2)),
    row(
        "window on every layer",
        "mixed",
        "KV400 KV402",
        (MODE, "sparse_mode=4", 2),
        (PRE, "pre_tokens=19", 2),
    ),
    row(
        "layer types off by one",
        "mixed",
        "KV400 KV402",
        ("config.layer_types[layer_idx]", "config.layer_types[layer_idx - 1]"),
    ),
    row(
        "every layer reads the sliding group's table",
        "mixed",
        "KV401 KV404",
        ("block_table=block_table[self.attn_type]", 'block_table=block_table["SlidingWindow"]'),
    ),
    row(
        "every layer writes to the sliding group's slots",
        "mixed",
        "KV401",
        ("slots = slot_mapping[self.attn_type]", 'slots = slot_mapping["SlidingWindow"]'),
    ),
    row("sinks dropped", "mixed", "KV400 KV419", ("            learnable_sink=self.sinks,\n", "")),
    row(
        "prefill reads the sliding cache",
        "mixed",
        "KV400",
        (
            "                query,\n                key,\n                value,\n",
            "                query,\n                self.k_cache.view(*self.k_cache.shape[:2], -1),\n"
            "                self.v_cache.view(*self.v_cache.shape[:2], -1),\n"
            "                block_table=block_table[self.attn_type],\n                block_size=self.block_size,\n",
        ),
        ("actual_seq_kvlen=q_lengths", "actual_seq_kvlen=kv_lengths"),
        (
            "        if forward_metadata.is_prefill:\n            output, _",
            "        if forward_metadata.is_prefill:\n            self.write(key, value, slots)\n            output, _",
        ),
    ),
)

MLA = (
    row(
        "mscale squared dropped",
        "mla",
        "KV400 KV418",
        ('        self.scaling *= mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2\n', ""),
    ),
    row(
        "scale of the absorbed dims",
        "mla",
        "KV400 KV418",
        ("self.q_dim**-0.5", "(self.rank + self.rope_dim) ** -0.5"),
    ),
    row(
        "rope on the wrong part",
        "mla",
        "KV400",
        ("q_nope, q_rope = self", "q_rope, q_nope = self"),
        ("(self.nope_dim, self.rope_dim), dim=-1", "(self.rope_dim, self.nope_dim), dim=-1"),
    ),
    row(
        "half rotary on the query of interleaved weights",
        "mla",
        "KV400",
        ("    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)\n", ""),
    ),
    row(
        "NZ written, ND read",
        "mla",
        "KV401",
        (
            "        return cache.view(blocks, 1, dim // 16, size, 16)",
            "        return cache.view(blocks, size, dim)",
        ),
    ),
    row(
        "latent not normalised in prefill",
        "mla",
        "KV400",
        ("k_nope, k_rope = k_nope.view(tokens, self.rank),", "k_nope, k_rope = latent[:, : self.rank],"),
    ),
    row(
        "heads and tokens of the absorbed output confused",
        "mla",
        "KV400",
        (
            'torch.einsum("htr,hdr->thd", latent_out, to_value)',
            'torch.einsum("thr,hdr->thd", latent_out.reshape(tokens, self.num_heads, -1), to_value)',
        ),
    ),
    row(
        "key length without the new token, absorbed",
        "mla",
        "KV400 KV405",
        (
            "actual_seq_kvlen=forward_metadata.actual_seq_lengths_kv",
            "actual_seq_kvlen=(forward_metadata.actual_seq_lengths_kv - 1).clamp(min=1)",
        ),
    ),
    row(
        "value half of kv_b_proj used for the keys",
        "mla",
        "KV400",
        (
            "weight[:, : self.nope_dim], weight[:, self.nope_dim :]",
            "weight[:, self.nope_dim :], weight[:, : self.nope_dim]",
        ),
    ),
    row(
        "key heads of the absorbed call not one",
        "mla",
        "KV453",
        ("num_key_value_heads=1", "num_key_value_heads=self.num_heads"),
        refused=True,
    ),
    row(
        "causal mode without a mask, absorbed",
        "mla",
        "KV450",
        ("                sparse_mode=0,\n", "                sparse_mode=3,\n"),
        refused=True,
    ),
    row("ND written, NZ read", "mla", "KV401", ('cache_mode="PA_NZ"', 'cache_mode="PA"')),
    row(
        "latent and rope cache swapped",
        "mla",
        "KV462",
        (
            "            self.rope_cache,\n            self.nope_cache,\n",
            "            self.nope_cache,\n            self.rope_cache,\n",
        ),
        refused=True,
    ),
    row(
        "latent cached without the norm's weight",
        "mla",
        "KV400",
        ("            self.kv_a_layernorm.weight,\n", "            torch.ones_like(self.kv_a_layernorm.weight),\n"),
    ),
    row(
        "key not rotated",
        "mla",
        "KV400",
        ("            cos.view(tokens, 1, 1, -1),\n", "            torch.ones_like(cos).view(tokens, 1, 1, -1),\n"),
        ("            sin.view(tokens, 1, 1, -1),\n", "            torch.zeros_like(sin).view(tokens, 1, 1, -1),\n"),
    ),
    row(
        "value side of the absorbed form missing",
        "mla",
        "KV400",
        (
            'output = torch.einsum("htr,hdr->thd", latent_out, to_value)',
            "output = latent_out[..., : self.v_dim].transpose(0, 1)",
        ),
    ),
    row(
        "fresh latent read without asking for it",
        "mla",
        "KV401",
        ("            is_output_kv=True,\n", ""),
    ),
    row(
        "rope part of the query dropped in decode",
        "mla",
        "KV400",
        ("query_rope=q_rope.contiguous()", "query_rope=torch.zeros_like(q_rope)"),
    ),
    row(
        "halves of kv_b_proj taken before loading",
        "mla",
        "KV400",
        (
            "        self.nope_cache = torch.Tensor([])\n",
            "        self.early = self.kv_b_proj.weight.detach().clone()\n        self.nope_cache = torch.Tensor([])\n",
        ),
        ("weight = self.kv_b_proj.weight.view", "weight = self.early.view"),
    ),
    row(
        "halves of kv_b_proj cut along the latent, not per head",
        "mla",
        "KV400",
        (
            "self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.rank)",
            "self.kv_b_proj.weight.T.reshape(self.num_heads, self.nope_dim + self.v_dim, self.rank)",
        ),
    ),
    row(
        "halves of kv_b_proj as all keys, then all values",
        "mla",
        "KV400",
        (
            "        to_key, to_value = weight[:, : self.nope_dim], weight[:, self.nope_dim :]\n",
            "        both = self.kv_b_proj.weight.view(-1, self.num_heads, self.nope_dim, self.rank)\n"
            "        to_key, to_value = both[0], both[1]\n",
        ),
    ),
    row(
        "mscale once",
        "mla",
        "KV400 KV418",
        ('yarn["mscale_all_dim"]) ** 2', 'yarn["mscale_all_dim"])'),
    ),
    row(
        "interleaved rotary where the cache holds halves",
        "mla",
        "KV400",
        (
            "    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)\n"
            "    first, second = x.chunk(2, dim=-1)\n"
            "    return x * cos + torch.cat((-second, first), dim=-1) * sin\n",
            "    half = cos.shape[-1] // 2\n"
            "    even, odd = x[..., ::2], x[..., 1::2]\n"
            "    a, b = cos[..., :half], sin[..., :half]\n"
            "    return torch.stack((even * a - odd * b, odd * a + even * b), dim=-1).flatten(-2)\n",
        ),
    ),
    row(
        "a block table and slots of the model's own",
        "mla",
        "KV401",
        (
            "            slot_mapping[self.attn_type].view(-1),\n",
            "            forward_metadata.kv_len.view(-1)[:tokens] if forward_metadata.is_prefill\n"
            "            else slot_mapping[self.attn_type].view(-1) % self.block_size,\n",
        ),
    ),
    row(
        "own block table, block by block in order",
        "mla",
        "KV401",
        (
            "block_table=block_table[self.attn_type]",
            "block_table=torch.arange(block_table[self.attn_type].numel(), dtype=torch.int32).view_as("
            "block_table[self.attn_type])",
        ),
    ),
    row(
        "rotary rows counted over the packed tokens",
        "mla",
        "KV400",
        (
            "angles = position_ids.view(-1, 1).float()",
            "angles = (torch.arange(position_ids.numel()) if forward_metadata.is_prefill else position_ids)"
            ".view(-1, 1).float()",
        ),
    ),
    row(
        "head count of the absorbed call",
        "mla",
        "KV453",
        (
            "                num_query_heads=self.num_heads,\n                num_key_value_heads=1,\n",
            "                num_query_heads=self.num_heads // 2,\n                num_key_value_heads=1,\n",
        ),
        refused=True,
    ),
    row(
        "values and keys of prefill swapped",
        "mla",
        "KV400",
        (
            "                key.contiguous(),\n                value.contiguous(),\n",
            "                value.contiguous(),\n                key.contiguous(),\n",
        ),
    ),
)

ROWS = (*GQA, *MIXED, *MLA)
