"""`kvskill template`: every template has a header and example values, renders legal code, and follows a manifest."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvskill.cli import cli
from kvskill.manifest import (
    CacheSpec,
    Decision,
    Group,
    Manifest,
    ModelRef,
    TargetProfile,
    dump_manifest,
)
from kvskill.opsinfo import check_calls, reference_data
from kvskill.opsinfo.templates import default_context, list_templates, model_contexts, parse_header, render_template
from kvskill.verifier.backend.schemas import load_table

TEMPLATES = list_templates()
SCHEMAS = list(load_table().schemas("2.13.0").values())


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(args), standalone_mode=False)
    if result.exception and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 70), str(result.exception)
    return result.exit_code, result.output


def decision(value: object) -> Decision:  # type: ignore[type-arg]
    return Decision(value=value, source="rule")


def group(layers: tuple[int, ...], **change: object) -> Group:
    values: dict[str, object] = {
        "layers": layers,
        "attention": "GQA",
        "attn_type": "FullAttention",
        "q_heads": 8,
        "kv_heads": 2,
        "k_head_dim": 64,
        "v_head_dim": 64,
        "caches": tuple(
            CacheSpec(name=f"{x}_cache", dim="self.hd", num_head="self.kv_rank", dtype="torch.bfloat16") for x in "kv"
        ),
    }
    return Group(**{**values, **change})  # type: ignore[arg-type]


def manifest(groups: tuple[Group, ...], **change: object) -> Manifest:
    values: dict[str, object] = {
        "tool_version": "0",
        "inputs": (),
        "model": ModelRef(name="x", folder="models/x"),
        "deployment": decision("framework"),
        "kv_mode": decision("paged"),
        "target": TargetProfile(found=True, block_size_on="entry"),
        "fa_version": decision(2),
        "mla_absorb": decision(False),
        "mixed_attn_types": decision(len({g.attn_type for g in groups}) > 1),
        "block_size": decision(128),
        "window_rule": decision("hf"),
        "groups": groups,
    }
    return Manifest(**{**values, **change})  # type: ignore[arg-type]


def test_every_template_has_values_and_every_entry_a_template() -> None:
    entries = reference_data("template_contexts")["templates"]
    assert sorted(entries) == sorted(TEMPLATES)
    for row in entries.values():
        assert set(row["manifest"]) <= set(row["context"]) and row["for"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_header(name: str) -> None:
    header = TEMPLATES[name].header
    assert header["name"] == name and header["constraints"] and header["evidence"]
    assert "{#" not in TEMPLATES[name].body


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_code_that_calls_operators_as_released(name: str) -> None:
    code = render_template(name, default_context(name))
    ast.parse(code)
    assert check_calls(code, SCHEMAS) == []
    assert "{{" not in code and "Undefined" not in code and "TemplateReference" not in code


def test_header_reader() -> None:
    fields, rest = parse_header("{#-\nname: a/b\nnote: one\n    two: three\n-#}\ncode\n")
    assert fields == {"name": "a/b", "note": "one two: three"} and rest == "code\n"
    assert parse_header("code\n") == ({}, "code\n")


def test_manifest_decides_versions_and_windows(tmp_path: Path) -> None:
    full, sliding = group((0, 1, 3)), group((2,), attn_type="SlidingWindow", sliding_window=8, sinks=True)
    contexts = dict(model_contexts("framework/attend", manifest((full, sliding))))
    assert list(contexts) == [
        "group 0: layers 0-1, 3, GQA, FullAttention",
        "group 1: layers 2, GQA, SlidingWindow",
    ]
    codes = [render_template("framework/attend", c) for c in contexts.values()]
    assert "learnable_sink" in codes[1] and "learnable_sink" not in codes[0]
    assert all("sparse_mode=4 if" in c and "- 1" in c and "self.kv_rank" in c for c in codes)
    only = manifest((group((0,), attn_type="SlidingWindow"),), fa_version=decision(1), window_rule=decision("upstream"))
    code = render_template("framework/attend", model_contexts("framework/attend", only)[0][1])
    assert "num_heads=" in code and "sparse_mode=4," in code and "- 1," not in code
    assert model_contexts("framework/attend", manifest((group((0,), attention="MLA"),))) == []


def test_eras_decide_where_block_size_stands() -> None:
    old = manifest((group((0,)),), target=TargetProfile(found=True, block_size_on="model"))
    new = manifest((group((0,)),))
    for name, where in (("framework/get_cache_info", old), ("framework/cache_entries", new)):
        for given in (old, new):
            code = render_template(name, model_contexts(name, given)[0][1])
            assert ("block_size=" in code) == (given is where), (name, code)


def test_show_for_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "models/x"
    folder.mkdir(parents=True)
    (folder / "kv_manifest.yaml").write_text(dump_manifest(manifest((group((0,)),))), encoding="utf-8")
    for args in (["--model", str(folder)], ["--model", "x", "--repo", str(tmp_path)]):
        code, out = run("template", "show", "framework/attend", *args)
        assert code == 0 and "group 0: layers 0" in out and "self.kv_rank" in out
    code, out = run("template", "show", "attend", "--model", str(folder), "--json")
    data = json.loads(out)
    assert code == 0 and data["name"] == "framework/attend" and data["codes"][0]["code"]
    code, text = run("template", "show", "framework/attend", "--model", str(tmp_path))
    assert code == 2 and "KV010" in text


def test_list_show_and_unknown() -> None:
    code, out = run("template", "list")
    assert code == 0 and len(out.splitlines()) == len(TEMPLATES)
    assert {t["name"] for t in json.loads(run("template", "list", "--json")[1])} == set(TEMPLATES)
    code, text = run("template", "show", "attend")
    assert code == 2 and "framework/attend" in text and "standalone/attend" in text
    code, out = run("template", "show", "framework/attend", "--raw", "--lines", "12")
    assert code == 0 and "more lines" in out and len(out.splitlines()) == 13
    code, text = run("template", "show", "atend")
    assert code == 2 and "attend" in text
