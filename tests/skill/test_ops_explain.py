"""The commands that answer from the fact tables: complete, bounded, exit 2 with near names, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvskill.cli import cli
from kvskill.opsinfo import check_calls, load_operators, parse_schema, reference_data
from kvskill.verifier.backend.schemas import load_table


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(args), standalone_mode=False)
    if result.exception and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 70), str(result.exception)
    return result.exit_code, result.output


def test_every_schema_of_the_table_parses() -> None:
    table = load_table()
    for release in table.releases:
        for key, text in table.schemas(release).items():
            schema = parse_schema(text)
            assert ".".join(filter(None, (schema.name, schema.overload))) == key
            assert all(a.type and a.name for a in schema.arguments)


def test_schema_details() -> None:
    text = load_table().schemas("2.13.0")["npu_fused_infer_attention_score_v2"]
    schema = parse_schema(text)
    assert [a.name for a in schema.positional] == ["query", "key", "value"]
    assert schema.argument("softmax_scale").default == "1.0"  # type: ignore[union-attr]
    assert schema.argument("pre_tokens").default == "2147483647"  # type: ignore[union-attr]
    assert schema.return_count == 2 and schema.mutates == ()
    write = parse_schema(load_table().schemas("2.13.0")["npu_kv_rmsnorm_rope_cache_v2"])
    assert set(write.mutates) == {"k_cache", "ckv_cache"} and write.return_count == 2


def test_argument_map_agrees_with_the_schemas() -> None:
    schemas = load_table().schemas("2.13.0")
    v1 = parse_schema(schemas["npu_fused_infer_attention_score"])
    v2 = parse_schema(schemas["npu_fused_infer_attention_score_v2"])
    for row in reference_data("operators/fused_infer_attention")["argument_map"]:
        for schema, names, other in ((v1, row["v1"], row["v2"]), (v2, row["v2"], row["v1"])):
            for name in (n.strip() for n in names.split(",")):
                if name == "absent":
                    assert all(schema.argument(n.strip()) is None for n in other.split(",") if n.strip() != "...")
                elif name != "...":
                    argument = schema.argument(name)
                    assert argument is not None, (name, row["meaning"])
                    default = str(row["default"]).split(" ")[0].strip('"')
                    if default not in ("none", "none,"):
                        assert argument.default is not None and argument.default.strip('"') == default, row


def test_facts_that_a_schema_can_confirm() -> None:
    """Return arity, declared mutation, defaults: the prose must follow the table in every release."""
    table = load_table()
    for release in table.releases:
        schemas = table.schemas(release)
        for name, count in (("npu_kv_rmsnorm_rope_cache", 4), ("npu_kv_rmsnorm_rope_cache_v2", 2)):
            if name in schemas:
                schema = parse_schema(schemas[name])
                assert schema.return_count == count and schema.argument("epsilon").default == "1e-5"  # type: ignore[union-attr]
                assert bool(schema.mutates) == (count == 2)
                order = [a.name for a in schema.positional]
                assert order.index("k_cache") < order.index("ckv_cache")
        if "npu_rms_norm" in schemas:
            assert float(parse_schema(schemas["npu_rms_norm"]).argument("epsilon").default or 0) == 1e-6  # type: ignore[union-attr]
        if "npu_apply_rotary_pos_emb" in schemas:
            layout = parse_schema(schemas["npu_apply_rotary_pos_emb"]).argument("layout").default  # type: ignore[union-attr]
            train = table.facts(release)["train"]
            assert layout.strip("\"'") == ("BSND" if train in ("26.1.0", "2026-10") else "BSH"), release
        has_v2 = "npu_fused_infer_attention_score_v2" in schemas
        assert has_v2 == (table.facts(release)["train"] not in ("6.0.rc3", "6.0.0", "7.0.0", "7.1.0"))
        if has_v2:
            assert parse_schema(schemas["npu_fused_infer_attention_score_v2"]).argument("learnable_sink")
        assert parse_schema(schemas["npu_fused_infer_attention_score"]).argument("learnable_sink") is None


def test_every_documented_operator_is_in_the_table() -> None:
    known = set(load_table().operators)
    assert [o for o in load_operators() if o not in known] == []


def test_evidence_letters_and_sources_are_known() -> None:
    data = reference_data("operators/sources")
    letters = set(data["evidence"])
    for operator in load_operators().values():
        for fact in operator.facts:
            assert fact.evidence and set(fact.evidence) <= letters, fact
            assert fact.source
        for rows in operator.tables.values():
            if isinstance(rows, list):
                assert all(set(r["evidence"]) <= letters and r["evidence"] for r in rows)
    for topic in reference_data("topics")["topics"].values():
        for _, evidence in topic["points"]:
            assert evidence and set(evidence) <= letters | {"rule"}
    for error in reference_data("common_errors")["errors"].values():
        assert error["evidence"] and set(error["evidence"]) <= letters


def test_see_references_exist() -> None:
    topics = reference_data("topics")["topics"]
    errors = reference_data("common_errors")["errors"]
    assert all(s in topics for row in [*topics.values(), *errors.values()] for s in row["see"])
    assert not set(topics) & set(errors)
    assert {e["symptom"] for e in errors.values()} == {"silent", "error", "error (cpu)"}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("npu_fused_infer_attention_score_v2(q, k, v, scale=1.0)", "FA v2 calls it softmax_scale"),
        ("npu_fused_infer_attention_score(q, k, v, actual_seq_qlen=n)", "FA v1 calls it actual_seq_lengths"),
        ("npu_fused_infer_attention_score(q, k, v, learnable_sink=s)", "unknown keyword learnable_sink"),
        ("npu_fused_infer_attention_score_v2(q, k, v)", "relies on a default for num_query_heads"),
        ("npu_fused_infer_attention_score_v2(q, k, v, block_table=t)", "block_table without block_size"),
        ("npu_fused_infer_attention_score_v2(q, k, v, sparse_mode=4)", "sparse_mode=4 without atten_mask"),
        ("npu_scatter_nd_update_(cache, slots)", "missing updates"),
        ("npu_scatter_nd_update_(cache, slots, k, 1)", "4 positional"),
        ("npu_scatter_nd_update_(cache, slots, k, updates=k)", "given twice"),
        ("npu_scatter_nd_update_.default(cache, slots)", "missing updates"),
    ],
)
def test_wrong_calls_are_found(call: str, expected: str) -> None:
    schemas = load_table().schemas("2.13.0").values()
    assert expected in "\n".join(map(str, check_calls(f"x = torch.ops.npu.{call}", schemas)))


def test_right_call_and_missing_operator() -> None:
    call = """out, _ = self.fa_ops.npu_fused_infer_attention_score_v2(
        q, k, v, num_query_heads=8, num_key_value_heads=2, softmax_scale=s, input_layout="TND",
        sparse_mode=3, atten_mask=m, actual_seq_qlen=a, actual_seq_kvlen=b)"""
    assert check_calls(call, load_table().schemas("2.13.0").values()) == []
    assert "does not register" in str(check_calls(call, load_table().schemas("2.5.1.post1").values())[0])
    spread = "torch_npu.npu_fused_infer_attention_score_v2(q, k, v, **common)"
    assert check_calls(spread, load_table().schemas("2.13.0").values()) == []


def test_ops_list_and_show() -> None:
    code, out = run("ops", "list")
    assert code == 0 and "npu_scatter_nd_update_" in out and "2.13.0" in out
    code, out = run("ops", "list", "--release", "2.5.1.post1")
    assert code == 0 and "score_v2:" not in out
    code, out = run("ops", "show", "npu::npu_fused_infer_attention_score_v2", "--release", "2.13.0")
    assert code == 0 and "learnable_sink" in out and "NPU: not run" in out
    code, out = run("ops", "show", "torch_npu.npu_fused_infer_attention_score_v2", "--section", "lengths")
    assert code == 0 and "per sequence" in out and "learnable_sink" not in out
    code, out = run("ops", "show", "npu_fused_infer_attention_score_v2", "--release", "2.5.1.post1")
    assert code == 0 and "not registered" in out


def test_ops_json() -> None:
    code, out = run("ops", "show", "npu_kv_rmsnorm_rope_cache", "--json")
    data = json.loads(out)
    assert code == 0 and data["schemas"] and data["facts"][0]["evidence"] and data["npu"] == "not run"
    assert len(json.loads(run("ops", "list", "--json")[1])["releases"]) == len(load_table().releases)
    assert json.loads(run("ops", "list", "--all", "--json")[1])["operators"]


def test_unknown_names_give_near_ones() -> None:
    for args, near in (
        (("ops", "show", "npu_fused_infer_attention_v2"), "npu_fused_infer_attention_score_v2"),
        (("ops", "list", "--release", "2.13"), "2.13.0"),
        (("explain", "windw"), "window"),
        (("explain", "KV99"), "KV"),
        (("ops", "show", "npu_rms_norm", "--section", "lengths"), "no table"),
    ):
        code, text = run(*args)
        assert code == 2 and near in text, (args, text)


def test_output_is_bounded() -> None:
    code, out = run("ops", "show", "npu_fused_infer_attention_score_v2", "--lines", "10")
    assert code == 0 and len(out.splitlines()) == 11 and "more lines" in out
    assert len(run("explain")[1].splitlines()) <= 101
    assert "more lines" not in run("explain", "--lines", "0")[1]


def test_explain_everything() -> None:
    overview = json.loads(run("explain", "--json")[1])
    names = [n.split(" ")[0] for kind in overview.values() for n in kind]
    names += [row["name"] for row in reference_data("rules/registry").values()]
    for name in names:
        code, out = run("explain", name, "--lines", "0")
        assert code == 0 and out.strip(), name
        assert json.loads(run("explain", name, "--json")[1])["text"]
    assert run("explain", "kv012")[1] == run("explain", "wrong-manifest-field")[1]


def test_no_torch() -> None:
    script = (
        "import sys; from kvskill.cli import cli\n"
        "for a in (['ops', 'list'], ['explain', 'mask'], ['skill', 'validate'], ['template', 'list']):\n"
        "    cli.main(a, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'libcst' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
