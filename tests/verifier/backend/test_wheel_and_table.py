"""The real wheel over stub libraries and the schema table are the same to a caller."""

from __future__ import annotations

import pytest

# undeclared in the real schema, so opcheck must object: `.out` lists, caches of v1, the in-place rotary
UNDECLARED = {
    "npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out", "npu_kv_rmsnorm_rope_cache",
    "npu_apply_rotary_pos_emb",
}  # fmt: skip
ALIASED_RESULT = {"npu_kv_rmsnorm_rope_cache", "npu_apply_rotary_pos_emb"}  # Meta returns fresh tensors
WITHOUT_META = {"npu_format_cast", "npu_format_cast.Tensor", "get_npu_format"}


@pytest.fixture(params=["wheel", "table"])
def either(request):
    return request.getfixturevalue(request.param)


def test_every_kernel_has_a_sample(table):
    assert table["kernels"] == table["samples"] and len(table["kernels"]) > 60


def test_backends_say_what_they_are(wheel, table):
    assert wheel["info"]["kind"] == "wheel" and table["info"]["kind"] == "table"
    for found in (wheel, table):
        assert found["info"]["torch_npu"] == "2.13.0" and found["info"]["profile"] == "cann-9.0"
        assert found["info"]["torch"].startswith("2.13")


def test_schemas_and_defaults_are_equal(wheel, table):
    assert len(table["schemas"]) > 100
    assert wheel["schemas"] == table["schemas"]


def test_results_are_equal_bit_for_bit(wheel, table):
    assert wheel["results"] == table["results"]


def test_mutated_inputs_are_seen(table):
    """The digests of results cover in-place writes: the same op in place and not differs in its inputs."""
    results = table["results"]
    assert results["npu_silu"]["out"] == results["npu_silu_"]["out"]
    assert results["npu_silu"]["inputs"] != results["npu_silu_"]["inputs"]


@pytest.mark.parametrize("form", ["list", "tuple", "int32 tensor", "int64 tensor", "list of 0-d tensors"])
def test_lengths_in_every_form_that_the_eager_binder_takes(either, form):
    assert either["binder"][form] == "accepted"


@pytest.mark.parametrize(("form", "words"), [
    ("float tensor", "failed to match any schema"), ("0-d tensor", "failed to match any schema"),
    ("unknown keyword", "Unknown keyword argument 'scale'"), ("missing value", "failed to match any schema"),
    ("too many positional", "failed to match any schema"), ("v1 keywords", "Unknown keyword argument 'softmax_scale'"),
    ("text as int", "failed to match any schema"),
])  # fmt: skip
def test_refusals_of_the_dispatcher(either, form, words):
    assert either["binder"][form].startswith("RuntimeError") and words in either["binder"][form]


def test_our_own_refusals_keep_their_type(either):
    binder = either["binder"]
    assert binder["no kernel"].startswith("MissingKernel: npu_lightning_indexer")
    assert binder["not modelled"].startswith("UnmodelledCall") and "query_quant_mode=3" in binder["not modelled"]
    assert binder["broken rule"].startswith("OperatorRuleViolation") and "fa-query-total" in binder["broken rule"]


def test_opcheck_schema(either):
    """Every kernel mutates and aliases exactly what its schema declares, but for the known undeclared ones."""
    failed = {n for n, v in either["opcheck"].items() if v["test_schema"] != "ok"}
    assert failed == UNDECLARED
    for name in UNDECLARED:
        assert "alias" in either["opcheck"][name]["test_schema"]


def test_opcheck_meta(wheel):
    """Shapes and dtypes of every kernel are those of the wheel's own Meta kernel."""
    failed = {n for n, v in wheel["opcheck"].items() if v["test_faketensor"] != "ok"}
    assert failed == ALIASED_RESULT | WITHOUT_META
    for name in ALIASED_RESULT:
        assert "outputs_alias_inputs" in wheel["opcheck"][name]["test_faketensor"]


def test_undeclared_mutations_are_marked_in_the_registry(run):
    text = """
import os; os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from kvskill.verifier.kernels.registry import load_kernels
print(sorted(k for k, v in load_kernels().items() if v.undeclared))
"""
    assert run(text).strip() == "['npu_apply_rotary_pos_emb', 'npu_kv_rmsnorm_rope_cache']"
