"""A small Legacy model in one file, with places to put other code in."""

from __future__ import annotations

from pathlib import Path

from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.modeling.program import load_program
from kvskill.analyzer.modeling.reader import read_program

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F
import torch_npu
{imports}

class Attn(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv = config.num_key_value_heads
        self.dim = config.head_dim
        self.scale = self.dim ** -0.5
        self.q = nn.Linear(config.hidden_size, self.heads * self.dim)
        self.k = nn.Linear(config.hidden_size, self.kv * self.dim)
        self.v = nn.Linear(config.hidden_size, self.kv * self.dim)
        self.o = nn.Linear(self.heads * self.dim, config.hidden_size)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.kv * self.dim,)
{init}
    def forward(self, x, forward_metadata):
        b, s, _ = x.size()
        q = self.q(x).view(b, s, self.heads, self.dim).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv, self.dim).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv, self.dim).transpose(1, 2)
        start = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            start = torch.zeros(b, dtype=torch.long)
{write}
        if not forward_metadata.is_prefill:
{read}
        k = k.repeat_interleave(self.heads // self.kv, dim=1)
        v = v.repeat_interleave(self.heads // self.kv, dim=1)
{attend}
        out = out.transpose(1, 2).reshape(b, s, -1)
        return self.o(out)


class Layer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.attn = Attn(config, infer_config, layer_idx)

    def forward(self, x, forward_metadata):
{layer}
        return x + self.attn(x, forward_metadata)


class TopForCausalLM(nn.Module):
    def __init__(self, config, infer_config, comm_manager=None, prefix=""):
        super().__init__()
        self.bs = infer_config.scheduler_config.batch_size_per_dp_rank
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, **kwargs):
        x = self.embed(input_ids.view(self.bs, -1))
        for layer in self.layers:
            x = layer(x, forward_metadata)
        return self.head(x[:, -1:])

    def load_weights(self, weights):
        return set()
"""
WRITE = """
        torch_npu.scatter_update_(self.k_cache, start, k.transpose(1, 2).reshape(b, s, -1), -2)
        torch_npu.scatter_update_(self.v_cache, start, v.transpose(1, 2).reshape(b, s, -1), -2)
"""
READ = """
            end = int(forward_metadata.actual_seq_lengths_kv.max())
            k = self.k_cache[:, :end].view(b, end, self.kv, self.dim).transpose(1, 2)
            v = self.v_cache[:, :end].view(b, end, self.kv, self.dim).transpose(1, 2)
"""
ATTEND = """
        out = F.scaled_dot_product_attention(q, k, v, is_causal=forward_metadata.is_prefill, scale=self.scale)
"""


def facts(tmp_path: Path, **parts: str) -> ModelFacts:
    """Facts of the model with some of its parts (imports, init, write, read, attend) replaced."""
    text = MODEL.format(
        imports=parts.get("imports", ""),
        init=parts.get("init", ""),
        write=parts.get("write", WRITE),
        read=parts.get("read", READ),
        layer=parts.get("layer", ""),
        attend=parts.get("attend", ATTEND),
    )
    path = tmp_path / "modeling_small.py"
    path.write_text(text, encoding="utf-8")
    return read_program(load_program([path], tmp_path), CONFIG)
