"""Matrix products and the MoE chain, against plain per-token formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(a, b, tol=1e-12):
    assert a.shape == b.shape
    assert (a.double() - b.double()).abs().max() <= tol


@pytest.mark.parametrize("perm", [None, [1, 0, 2]])
def test_transpose_batchmatmul(call, perm):
    """MLA absorption of q [T, N, K] and of the attention output [N, T, K]."""
    weight = rand(3, 16, 32)
    x = rand(5, 3, 16, seed=1) if perm else rand(3, 5, 16, seed=1)
    out = call("npu_transpose_batchmatmul", x, weight, perm_x1=perm)
    near(out, torch.einsum("tnk,nkm->tnm" if perm else "ntk,nkm->tnm", x, weight))
    assert out.is_contiguous()


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_matmul_by_every_kind_of_group_list(call, kind, bias):
    counts = [2, 0, 3, 1]
    x, weight, b = rand(6, 8), rand(4, 8, 5, seed=1), rand(4, 5, seed=2)
    groups = {
        0: torch.tensor(counts).cumsum(0),
        1: torch.tensor(counts),
        2: torch.tensor([[0, 2], [2, 3], [3, 1], [0, 0]]),
    }[kind]
    out = call(
        "npu_grouped_matmul", [x], [weight], bias=[b] if bias else None, group_list=groups, split_item=3,
        group_type=0, group_list_type=kind,
    )  # fmt: skip
    assert len(out) == 1
    expert = [e for e, n in enumerate(counts) for _ in range(n)]
    near(out[0], torch.stack([x[i] @ weight[e] + (b[e] if bias else 0) for i, e in enumerate(expert)]))


def test_grouped_matmul_rows_behind_the_groups_are_undefined(call):
    out = call("npu_grouped_matmul", [rand(4, 8)], [rand(2, 8, 5)], group_list=torch.tensor([1, 3]), split_item=3,
               group_type=0)[0]  # fmt: skip
    assert torch.isfinite(out[:3]).all() and torch.isnan(out[3:]).all()


def test_grouped_matmul_lists(call):
    xs, ws = [rand(2, 4), rand(3, 4, seed=1)], [rand(4, 5), rand(4, 5, seed=1)]
    out = call("npu_grouped_matmul", xs, ws, split_item=0, group_type=-1)
    for y, x, w in zip(out, xs, ws, strict=True):
        near(y, x @ w)
    whole = call("npu_grouped_matmul.List", [torch.cat(xs)], ws, group_list=[2, 5], split_item=3, group_type=0)
    near(whole[0], torch.cat(out))


def test_grouped_matmul_refuses_quantised_and_odd_forms(call):
    with pytest.raises(NotImplementedError, match="int8"):
        call("npu_grouped_matmul", [rand(2, 4).to(torch.int8)], [rand(1, 4, 4).to(torch.int8)],
             group_list=torch.tensor([2]), split_item=3, group_type=0)  # fmt: skip
    with pytest.raises(NotImplementedError, match="per_token_scale"):
        call("npu_grouped_matmul", [rand(2, 4)], [rand(1, 4, 4)], group_list=torch.tensor([2]), split_item=3,
             group_type=0, per_token_scale=[rand(2)])  # fmt: skip


def test_gating_softmax(call):
    x = rand(5, 6)
    y, index, rows = call("npu_moe_gating_top_k_softmax", x, None, 2)
    wanted = torch.softmax(x, -1).topk(2, -1)
    near(y, wanted.values)
    assert torch.equal(index.long(), wanted.indices) and index.dtype == torch.int32
    assert rows.tolist() == [[i, i + 5] for i in range(5)]  # column order: the reading of init_routing v1
    finished = torch.tensor([False, True, False, False, False])
    assert call("npu_moe_gating_top_k_softmax", x, finished, 2)[1][1].tolist() == [6, 6]


def test_gating_softmax_ties_take_the_lower_expert(call):
    assert call("npu_moe_gating_top_k_softmax", torch.zeros(1, 5), None, 3)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("renorm", [0, 1])
def test_gating_softmax_v2(call, renorm):
    x = rand(4, 6)
    y, index, full = call("npu_moe_gating_top_k_softmax_v2", x, k=3, renorm=renorm, output_softmax=True)
    top = x.topk(3, -1)
    near(y, torch.softmax(top.values, -1) if renorm else torch.softmax(x, -1).gather(-1, top.indices))
    assert torch.equal(index.long(), top.indices)
    assert full.shape == ((0,) if renorm else (4, 6))


@pytest.mark.parametrize(("norm_type", "select"), [(1, 1), (0, 0)])
def test_gating_top_k_by_groups(call, norm_type, select):
    """DeepSeek-V3 style choice, token by token."""
    x, bias = rand(7, 12), rand(12, seed=1)
    y, index, norm = call(
        "npu_moe_gating_top_k", x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=select,
        norm_type=norm_type, routed_scaling_factor=2.5, out_flag=True,
    )  # fmt: skip
    for t in range(7):
        scores = x[t].sigmoid() if norm_type else x[t].softmax(0)
        biased = (scores + bias).tolist()
        worth = []
        for g in range(4):
            best = sorted(biased[3 * g : 3 * g + 3], reverse=True)
            worth.append(best[0] + best[1] if select else best[0])
        groups = sorted(range(4), key=lambda g: -worth[g])[:2]
        experts = [e for g in groups for e in range(3 * g, 3 * g + 3)]
        chosen = sorted(experts, key=lambda e: -biased[e])[:3]
        assert index[t].tolist() == chosen
        weights = torch.stack([scores[e] for e in chosen])
        if norm_type:
            weights = weights / (weights.sum() + 1e-20)
        near(y[t], weights * 2.5)
        near(norm[t], scores, 1e-6)


def expert_sum(x, index, weight, scales):
    """sum_j scale[t, j] * (x[t] @ weight[expert]), the definition of a MoE layer."""
    return torch.stack([
        sum(scales[t, j] * (x[t] @ weight[index[t, j]]) for j in range(index.shape[1])) for t in range(len(x))
    ])  # fmt: skip


def test_chain_v2_init_gmm_finalize(call):
    x, weight = rand(6, 8), rand(5, 8, 8, seed=1)
    scales, index, _ = call("npu_moe_gating_top_k_softmax", rand(6, 5, seed=2), None, 2)
    expanded, place, counts, _ = call(
        "npu_moe_init_routing_v2", x, index, active_num=12, expert_num=5, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, 5], quant_mode=-1,
    )  # fmt: skip
    assert counts.tolist() == [int((index == e).sum()) for e in range(5)] and counts.dtype == torch.int64
    rows = call("npu_grouped_matmul", [expanded], [weight], group_list=counts, split_item=3, group_type=0,
                group_list_type=1)[0]  # fmt: skip
    skip = rand(6, 8, seed=3)
    out = call("npu_moe_finalize_routing", rows, skip, None, None, scales, place, None, drop_pad_mode=2)
    near(out, expert_sum(x, index.long(), weight, scales) + skip)


def test_chain_v1_init_gmm_finalize_with_bias(call):
    x, weight, bias = rand(6, 8), rand(5, 8, 8, seed=1), rand(5, 8, seed=4)
    scales, index, row = call("npu_moe_gating_top_k_softmax", rand(6, 5, seed=2), None, 2)
    expanded, place, experts = call("npu_moe_init_routing", x, row, index, 6)
    ends = call("npu_moe_compute_expert_tokens", experts, 5)
    assert ends.tolist() == torch.bincount(index.flatten(), minlength=5).cumsum(0).tolist()
    rows = call("npu_grouped_matmul", [expanded], [weight], group_list=ends.long(), split_item=3, group_type=0)[0]
    out = call("npu_moe_finalize_routing", rows, None, None, bias, scales, place, index)
    wanted = expert_sum(x, index.long(), weight, scales)
    wanted = wanted + torch.stack([sum(scales[t, j] * bias[index[t, j]] for j in range(2)) for t in range(6)])
    near(out, wanted)


def test_wrong_finalize_mode_gives_another_result(call):
    x = rand(4, 8)
    index = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1]], dtype=torch.int32)
    expanded, place, _, _ = call("npu_moe_init_routing_v2", x, index, expert_num=3, active_expert_range=[0, 3])
    scales = rand(4, 2, seed=5)
    good = call("npu_moe_finalize_routing", expanded, None, None, None, scales, place, None, drop_pad_mode=2)
    near(good, x * scales.sum(1, keepdim=True))
    bad = call("npu_moe_finalize_routing", expanded, None, None, None, scales, place, None, drop_pad_mode=0)
    assert (bad - good).abs().max() > 0.1


def test_init_routing_v2_with_a_range_of_experts(call):
    x = rand(3, 4)
    index = torch.tensor([[4, 1], [2, 3], [1, 0]], dtype=torch.int32)
    args = {"expert_num": 5, "active_expert_range": [1, 3], "expert_tokens_num_flag": True}
    expanded, place, counts, _ = call("npu_moe_init_routing_v2", x, index, expert_tokens_num_type=1, **args)
    assert counts.tolist() == [2, 1] and place.tolist() == [-1, 0, 2, -1, 1, -1]
    assert torch.equal(expanded[:3], x[[0, 2, 1]]) and torch.isnan(expanded[3:]).all()
    scatter = call("npu_moe_init_routing_v2", x, index, expert_tokens_num_type=1, row_idx_type=1, **args)[1]
    assert scatter[:3].tolist() == [1, 4, 2]
    assert call("npu_moe_init_routing_v2", x, index, expert_tokens_num_type=0, **args)[2].tolist() == [2, 3]
    pairs = call("npu_moe_init_routing_v2", x, index, expert_tokens_num_type=2, **args)[2]
    assert pairs.tolist() == [[1, 2], [2, 1], [0, 0], [0, 0], [0, 0]]


def test_re_routing_from_ranks_to_experts(call):
    counts = torch.tensor([[2, 1], [0, 3]])  # rank 0: experts 0 0 1; rank 1: 1 1 1
    tokens = rand(6, 4)
    out, _, index, total = call("npu_moe_re_routing", tokens, counts)
    assert index.tolist() == [0, 1, 2, 3, 4, 5] and total.tolist() == [2, 4]
    counts = torch.tensor([[1, 2], [2, 1]])
    out, scales, index, total = call("npu_moe_re_routing", tokens, counts, per_token_scales=torch.arange(6.0))
    assert index.tolist() == [0, 3, 4, 1, 2, 5] and scales.tolist() == [0, 3, 4, 1, 2, 5]
    assert torch.equal(out, tokens[[0, 3, 4, 1, 2, 5]]) and total.tolist() == [3, 3]
    back = out[index.float().argsort()]
    assert torch.equal(back, tokens)
    assert call("npu_moe_re_routing", tokens, counts, idx_type=1)[2].tolist() == index.argsort().tolist()


@pytest.mark.parametrize("mask", [False, True])
def test_dispatch_and_combine_on_one_rank(call, mask):
    x, weight, scales = rand(5, 8), rand(4, 8, 8, seed=1), rand(5, 2, seed=2)
    index = torch.tensor([[3, 0], [0, 1], [1, 3], [2, 0], [0, 2]], dtype=torch.int32)
    live = torch.tensor([True, True, False, True, True]) if mask else None
    group = ("g", 1, 0, 4)
    out = call("npu_moe_distribute_dispatch_v2", x, index, *group, x_active_mask=live)
    expanded, _, assist, counts, received = out[:5]
    assert expanded.shape == (10, 8) and assist.shape == (1280,)
    rows = call("npu_grouped_matmul", [expanded], [weight], group_list=counts, split_item=3, group_type=0,
                group_list_type=1)[0]  # fmt: skip
    got = call("npu_moe_distribute_combine_v2", rows, index, assist, received, scales, *group, x_active_mask=live)
    wanted = expert_sum(x, index.long(), weight, scales)
    if mask:
        wanted[2] = 0
    near(got, wanted)


def test_dispatch_refuses_several_ranks(call):
    with pytest.raises(NotImplementedError, match="ep_world_size 2"):
        call("npu_moe_distribute_dispatch_v2", rand(2, 8), torch.zeros(2, 1, dtype=torch.int32), "g", 2, 0, 4)


def test_permute_and_unpermute(call):
    x, probs = rand(4, 6), rand(4, 2, seed=1)
    index = torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1]])
    rows, place = call("npu_moe_token_permute", x, index)
    for i in range(8):
        assert torch.equal(rows[place[i]], x[i // 2])
    order = index.flatten().sort(stable=True).values
    assert torch.equal(index.flatten()[place.argsort()], order)
    near(call("npu_moe_token_unpermute", rows, place, probs), x * probs.sum(1, keepdim=True))
