"""The schema table: 47 releases, each binds; the derivation script reproduces it from an installed wheel."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kvskill.verifier.backend.schemas import load_table, release_key

ROOT = Path(__file__).resolve().parents[3]

BIND_ALL = """
import os, json
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
from kvskill.verifier.backend import library
from kvskill.verifier.backend.context import OpContext, using
from kvskill.verifier.backend.schemas import load_table
from kvskill.verifier.kernels.registry import load_kernels

table, kernels, found = load_table(), load_kernels(), {}
for release in table.releases:
    schemas = table.schemas(release)
    library.define_operators(schemas)
    row = {"kernels": 0}
    for name, text in schemas.items():
        if name in kernels:
            row["kernels"] += 1
            names = {a.name for a in torch._C.parse_schema("npu::" + text).arguments}
            import inspect
            needed = {p.name for p in inspect.signature(kernels[name].fn).parameters.values() if p.default is p.empty}
            assert needed <= names, (release, name, needed - names)
    q = torch.ones(2, 4, 64); k = torch.ones(2, 2, 64)
    kw = dict(num_heads=4, num_key_value_heads=2, scale=0.5, input_layout="TND", actual_seq_lengths=[1, 2],
              actual_seq_lengths_kv=[1, 2])
    with using(OpContext(dtype="bfloat16")):
        row["v1"] = torch.ops.npu.npu_fused_infer_attention_score(q, k, k, **kw)[0].sum().item()
        torch.ops.npu.npu_scatter_nd_update_(k, torch.tensor([[1]]), torch.zeros(1, 2, 64))
        row["scatter"] = k[1].sum().item()
        row["norm"] = list(torch.ops.npu.npu_rms_norm(q, torch.ones(64))[0].shape)
        row["rotary"] = list(torch.ops.npu.npu_rotary_mul(q, q[:, :1], q[:, :1]).shape)
        try:
            kw2 = dict(num_query_heads=4, num_key_value_heads=2, softmax_scale=0.5, input_layout="TND",
                       actual_seq_qlen=[1, 2], actual_seq_kvlen=[1, 2])
            row["v2"] = torch.ops.npu.npu_fused_infer_attention_score_v2(q, torch.ones(2, 2, 64), k, **kw2)[0].shape[0]
        except AttributeError:
            row["v2"] = None
    found[release] = row
    library._alive.pop()._destroy()
print(json.dumps(found))
"""


def test_there_are_47_releases_in_order():
    table = load_table()
    assert len(table.releases) == 47 and len(table.raw["sets"]) == 9
    assert list(table.releases) == sorted(table.releases, key=release_key)
    assert {e["train"] for e in table.raw["releases"].values()} == {
        "6.0.rc3", "6.0.0", "7.0.0", "7.1.0", "7.2.0", "7.3.0", "26.0.0", "26.1.0", "2026-10"
    }  # fmt: skip


def test_the_table_binds_for_every_release(run):
    found = json.loads(run(BIND_ALL))
    table = load_table()
    assert sorted(found) == sorted(table.releases)
    for release, row in found.items():
        assert row["v1"] == 2 * 4 * 64 and row["scatter"] == 0 and row["norm"] == [2, 4, 64], release
        has_v2 = "npu_fused_infer_attention_score_v2" in table.schemas(release)
        assert (row["v2"] is not None) == has_v2
        assert row["kernels"] >= 20
    assert found["2.1.0.post8"]["v2"] is None and found["2.8.0"]["v2"] == 2


@pytest.mark.parametrize(("release", "operator", "words"), [
    ("2.13.0", "npu_kv_rmsnorm_rope_cache_v2", "Tensor(a!) k_cache"),
    ("2.13.0", "npu_kv_rmsnorm_rope_cache", "Tensor k_cache"),
    ("2.8.0", "npu_fused_infer_attention_score_v2", "learnable_sink"),
    ("2.10.0", "npu_scatter_pa_kv_cache", "cache_mode='PA_NZ'"),
    ("2.13.0", "npu_grouped_matmul.List", "int[]? group_list"),
])  # fmt: skip
def test_known_facts_of_the_table(release, operator, words):
    assert words in load_table().schemas(release)[operator]


def test_absent_operators_are_absent():
    table = load_table()
    assert "npu_fused_infer_attention_score_v2" not in table.schemas("2.6.0")
    assert "npu_mla_prolog_v3" not in table.schemas("2.8.0") and "npu_mla_prolog_v3" in table.schemas("2.8.0.post2")


def test_unknown_release_names_the_nearest():
    with pytest.raises(KeyError, match=r"2\.8\.0\.post5"):
        load_table().schemas("2.8.0.post9")


def test_release_for_a_torch_version():
    table = load_table()
    assert table.newest_for_torch("2.8.0+cpu") == "2.8.0.post5"
    assert table.newest_for_torch("2.13.0+cpu") == "2.13.0"
    assert table.newest_for_torch("2.99.0") == "2.14.0"


def test_the_script_reproduces_the_table_from_the_installed_wheel(tmp_path):
    try:
        version = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        pytest.skip("torch_npu is not installed")
    table = load_table()
    if version not in table.releases:
        pytest.skip(f"torch_npu {version} is not in the table")
    out = tmp_path / "table.json"
    out.write_text(json.dumps({**table.raw, "schemas": [], "sets": [], "releases": {}}), encoding="utf-8")
    script = ROOT / "scripts/derive_op_schemas.py"
    command = [sys.executable, str(script), "--out", str(out)]
    done = subprocess.run([*command, "--installed"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text(encoding="utf-8"))
    assert sorted(made["schemas"]) == sorted(table.schemas(version).values())
    # written in canonical form: the shipped file is what the script writes
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0 and json.loads(out.read_text()) == made


def test_a_file_without_wheel_metadata_is_an_error(tmp_path):
    import zipfile

    bad = tmp_path / "x.whl"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("torch_npu/a.txt", "")
    script = ROOT / "scripts/derive_op_schemas.py"
    assert subprocess.run([sys.executable, str(script), str(bad)], capture_output=True).returncode != 0
