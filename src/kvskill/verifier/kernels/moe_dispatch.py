"""npu_moe_distribute_dispatch_v2 / combine_v2 for one rank: no communication, only the order of rows.

The contents of `assist_info_for_combine` are private to the pair on the device; here each expanded row stores
(rank, token, choice) in its first three words, and combine reads them back.
"""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.moe_routing import undefined_rows
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel

__all__ = ["dispatch_v2"]

_WORDS = 128  # int32 words of assist info a row (shape A * 128, Meta kernel of torch_npu 2.13.0)


def _one_rank(op: str, ep_world_size: int, tp_world_size: int, shared_expert_rank_num: int) -> None:
    if ep_world_size != 1 or tp_world_size > 1 or shared_expert_rank_num:
        raise UnmodelledCall(op, f"ep_world_size {ep_world_size}, tp_world_size {tp_world_size} (one rank only)")


@kernel("npu_moe_distribute_dispatch_v2", neutral=("group_ep", "group_tp", "comm_alg", "tp_rank_id"))
def dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: torch.Tensor | None = None,
    tp_world_size: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[torch.Tensor, ...]:
    """-> (expand_x [A, H], dynamic_scales [A], assist info [A * 128], expert_token_nums int64 [E],
    ep_recv_counts int32 [E], tp_recv_counts int32 [tp_world_size], expand_scales [0]).

    A = BS * min(E, K). Rows are sorted by expert; expert_token_nums are counts (type 1) or running sums (0),
    ep_recv_counts running sums. Rows behind the last token are undefined.
    """
    op = "npu_moe_distribute_dispatch_v2"
    _one_rank(op, ep_world_size, tp_world_size, shared_expert_rank_num)
    if quant_mode or global_bs not in (0, x.shape[0]):
        raise UnmodelledCall(op, f"quant_mode {quant_mode}, global_bs {global_bs}")
    tokens, k = expert_ids.shape
    capacity = tokens * min(moe_expert_num, k)
    live = torch.ones(tokens, dtype=torch.bool) if x_active_mask is None else x_active_mask.bool()
    if live.dim() != 1:
        raise UnmodelledCall(op, "a mask of single choices")
    choices = [(int(expert_ids[t, j]), t, j) for t in range(tokens) if live[t] for j in range(k)]
    choices.sort(key=lambda c: c[0])  # stable: token order within an expert
    expanded = undefined_rows(x, capacity)
    assist = torch.full((capacity, _WORDS), -1, dtype=torch.int32)
    counts = torch.zeros(moe_expert_num, dtype=torch.int64)
    for row, (expert, t, j) in enumerate(choices):
        expanded[row] = x[t]
        assist[row, :3] = torch.tensor([ep_rank_id, t, j])
        counts[expert] += 1
    ends = counts.cumsum(0)
    return (
        expanded,
        undefined_rows(torch.empty(0, dtype=torch.float32), capacity),
        assist.flatten(),
        counts if expert_token_nums_type == 1 else ends,
        ends.to(torch.int32),
        torch.full((tp_world_size,), int(ends[-1]), dtype=torch.int32),
        torch.empty(0, dtype=torch.float32),
    )


@kernel("npu_moe_distribute_combine_v2", neutral=("group_ep", "group_tp", "comm_alg", "tp_rank_id", "tp_send_counts"))
def combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    tp_world_size: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
) -> torch.Tensor:
    """out[t] = sum_j scales[t, j] * (row of choice j of token t) [+ shared_expert_x[t]] -> [BS, H]."""
    op = "npu_moe_distribute_combine_v2"
    _one_rank(op, ep_world_size, tp_world_size, shared_expert_rank_num)
    if comm_quant_mode:
        raise UnmodelledCall(op, f"comm_quant_mode {comm_quant_mode}")
    out = torch.zeros(expert_ids.shape[0], expand_x.shape[1], dtype=up(expand_x).dtype)
    assist = assist_info_for_combine.reshape(-1, _WORDS)
    for row in range(int(ep_send_counts[-1])):
        _, t, j = assist[row, :3].tolist()
        out[t] += up(expand_x[row], out.dtype) * up(expert_scales, out.dtype)[t, j]
    if shared_expert_x is not None:
        out = out + up(shared_expert_x, out.dtype).reshape(out.shape)
    return out.to(expand_x.dtype)
