"""Linear layers whose weights are split over the ranks of a group.

Each parameter carries a `weight_loader(param, checkpoint_tensor[, shard])` that picks this rank's part.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def _part(tensor, dim, rank, parts):
    """Slice number `rank` of `parts` equal slices along `dim`."""
    size, rest = divmod(tensor.shape[dim], parts)
    if rest:
        raise ValueError(f"a dim of {tensor.shape[dim]} does not split into {parts}")
    return tensor.narrow(dim, rank * size, size)


def _copy(param, tensor):
    if param.shape != tensor.shape:
        raise ValueError(f"weight of shape {tuple(tensor.shape)} does not fit {tuple(param.shape)}")
    param.data.copy_(tensor)


class ReplicatedLinear(nn.Module):
    """The same weight on every rank."""

    def __init__(self, input_size, output_size, bias=False, params_dtype=None, prefix="", **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=params_dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(output_size, dtype=params_dtype), requires_grad=False) if bias else None
        self.weight.weight_loader = _copy

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class ColumnParallelLinear(nn.Module):
    """Splits the outputs: rank r computes slice r of them."""

    def __init__(self, input_size, output_size, bias=False, tp_size=1, tp_rank=0, prefix="", **_):
        super().__init__()
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.weight = nn.Parameter(torch.empty(output_size // tp_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(output_size // tp_size), requires_grad=False) if bias else None
        for param in (self.weight, self.bias):
            if param is not None:
                param.weight_loader = self._load

    def _load(self, param, tensor):
        _copy(param, _part(tensor, 0, self.tp_rank, self.tp_size))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Splits the inputs: every rank returns a partial sum, which the caller reduces."""

    def __init__(self, input_size, output_size, bias=False, tp_size=1, tp_rank=0, prefix="", **_):
        super().__init__()
        if bias and tp_size > 1:
            raise ValueError("a split bias would be added once per rank")
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.weight = nn.Parameter(torch.empty(output_size, input_size // tp_size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(output_size), requires_grad=False) if bias else None
        self.weight.weight_loader = self._load

    def _load(self, param, tensor):
        _copy(param, _part(tensor, 1, self.tp_rank, self.tp_size))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class QKVParallelLinear(nn.Module):
    """q, k and v in one matrix. With fewer kv heads than ranks, neighbours share a kv head."""

    def __init__(
        self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=False, tp_size=1, tp_rank=0,
        prefix="", **_,
    ):
        super().__init__()
        self.tp_size, self.tp_rank, self.head_size = tp_size, tp_rank, head_size
        self.total_num_kv_heads = total_num_kv_heads
        heads = total_num_heads // tp_size
        kv_heads = max(total_num_kv_heads // tp_size, 1)
        self.rows = {"q": (0, heads), "k": (heads, kv_heads), "v": (heads + kv_heads, kv_heads)}
        size = (heads + 2 * kv_heads) * head_size
        self.weight = nn.Parameter(torch.empty(size, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False) if bias else None
        for param in (self.weight, self.bias):
            if param is not None:
                param.weight_loader = self._load

    def _load(self, param, tensor, shard):
        start, heads = self.rows[shard]
        if shard == "q":
            mine = _part(tensor, 0, self.tp_rank, self.tp_size)
        else:
            parts = min(self.tp_size, self.total_num_kv_heads)
            mine = _part(tensor, 0, self.tp_rank * parts // self.tp_size, parts)
        param.data.narrow(0, start * self.head_size, heads * self.head_size).copy_(mine)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class VocabParallelEmbedding(nn.Module):
    """Splits the vocabulary; the caller masks foreign ids and reduces."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, params_dtype=None, tp_size=1, tp_rank=0, **_):
        super().__init__()
        self.tp_size, self.tp_rank = tp_size, tp_rank
        shape = (num_embeddings // tp_size, embedding_dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        self.weight.weight_loader = self._load

    def _load(self, param, tensor):
        _copy(param, _part(tensor, 0, self.tp_rank, self.tp_size))

    def forward(self, input_ids):
        return F.embedding(input_ids, self.weight)
