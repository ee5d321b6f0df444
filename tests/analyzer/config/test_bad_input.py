"""Broken input: one finding, exit 2 or 3, no traceback, no heavy import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvskill.analyzer.config import read_config, understand
from kvskill.analyzer.config.cli_report import config_only
from kvskill.analyzer.config.sidefiles import side_files
from kvskill.diagnostics import InputError, KvskillError, Refusal

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def good(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


BYTES = [
    ("truncated", good()[:60], "KV044", 2),
    ("empty file", b"", "KV044", 2),
    ("not json", b"model_type: llama", "KV044", 2),
    ("a list", b"[1, 2]", "KV045", 2),
    ("a string", b'"llama"', "KV045", 2),
    ("a number", b"3", "KV045", 2),
    ("null", b"null", "KV045", 2),
    ("NaN", good()[:-1] + b', "rope_theta": NaN}', "KV046", 2),
    ("Infinity", good()[:-1] + b', "head_dim": Infinity}', "KV046", 2),
    ("NaN in lists", good()[:-1] + b', "x": [[1, [NaN]]]}', "KV046", 2),
    ("NaN nested", good()[:-1] + b', "x": {"y": -Infinity}}', "KV046", 2),
    ("overflowing number", b'{"model_type": "llama", "hidden_size": 1e999}', "KV046", 2),
    ("only NaN", b"NaN", "KV046", 2),
    ("10 MB", b'{"a": "' + b"x" * 10_000_000 + b'"}', "KV042", 2),
    ("deep", b'{"a":' * 3000 + b"1" + b"}" * 3000, "KV047", 2),
    ("very deep list", b"[" * 200_000, "KV047", 2),
    ("40 levels", b'{"a":' * 40 + b"1" + b"}" * 40, "KV047", 2),
    ("duplicate key", b'{"model_type": "llama", "num_hidden_layers": 3, "num_hidden_layers": 4}', "KV048", 2),
    ("UTF-8 mark", b"\xef\xbb\xbf" + good(), "KV043", 2),
    ("UTF-16", json.dumps(GOOD).encode("utf-16"), "KV043", 2),
    ("UTF-16 without mark", json.dumps(GOOD).encode("utf-16-le"), "KV043", 2),
    ("Latin-1", b'{"a": "\xe9"}', "KV043", 2),
    ("5000 digits", b'{"model_type": "llama", "num_hidden_layers": ' + b"9" * 5000 + b"}", "KV050", 2),
    ("empty object", b"{}", "KV051", 2),
    ("unknown class alone", b'{"model_type": "zzz"}', "KV051", 2),
    ("some other object", b'{"name": "package", "version": "1"}', "KV051", 2),
    ("string for a number", good(num_hidden_layers="4"), "KV049", 2),
    ("boolean heads", good(num_attention_heads=True), "KV049", 2),
    ("half a layer", good(num_hidden_layers=1.5), "KV049", 2),
    ("list of layers", good(num_hidden_layers=[4]), "KV049", 2),
    ("negative layers", good(num_hidden_layers=-4), "KV050", 2),
    ("no layers", good(num_hidden_layers=0), "KV050", 2),
    ("too many layers", good(num_hidden_layers=10**30), "KV050", 2),
    ("zero heads", good(num_attention_heads=0), "KV050", 2),
    ("negative K/V heads", good(num_key_value_heads=-2), "KV050", 2),
    ("zero width", good(head_dim=0), "KV050", 2),
    ("string width", good(head_dim="64"), "KV049", 2),
    ("heads that do not divide", good(num_key_value_heads=3), "KV058", 3),
    ("more K/V heads than heads", good(num_key_value_heads=16), "KV058", 3),
    ("hidden size that does not divide", good(hidden_size=513), "KV058", 3),
    ("model_type a number", good(model_type=3), "KV049", 2),
    ("model_type a list", good(model_type=["llama"]), "KV049", 2),
    ("architectures a string", good(architectures="LlamaForCausalLM"), "KV049", 2),
    ("rope_scaling a string", good(rope_scaling="yarn"), "KV049", 2),
    ("quantization_config a string", good(quantization_config="fp8"), "KV049", 2),
    ("text_config a list", b'{"model_type": "gemma3", "text_config": [1]}', "KV049", 2),
    ("window a string", good(model_type="mistral", sliding_window="4096"), "KV049", 2),
    ("softcap a string", good(model_type="gemma2", attn_logit_softcapping="50"), "KV049", 2),
    ("scale of zero", good(model_type="gemma3_text", query_pre_attn_scalar=0), "KV050", 2),
    ("negative latent rank", good(model_type="deepseek_v3", kv_lora_rank=-1), "KV050", 2),
    ("string experts", good(num_experts="8"), "KV049", 2),
    ("two layer counts", good(n_layer=5), "KV055", 3),
    ("short layer_types", good(layer_types=["full_attention"] * 3), "KV052", 3),
    ("layer_types a string", good(layer_types="full"), "KV049", 2),
    ("layer_types of numbers", good(layer_types=[0, 1, 0, 1]), "KV049", 2),
    ("unknown layer word", good(layer_types=["full_attention"] * 3 + ["odd"]), "KV053", 3),
    ("all layers shared", good(model_type="gemma4_text", num_kv_shared_layers=4), "KV059", 3),
]


@pytest.mark.parametrize(("raw", "code", "exit_code"), [b[1:] for b in BYTES], ids=[b[0] for b in BYTES])
def test_one_finding_and_the_exit_code(tmp_path: Path, raw: bytes, code: str, exit_code: int) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    started = time.monotonic()
    with pytest.raises(KvskillError) as caught:
        understand(read_config(path), shown="config.json")
    assert time.monotonic() - started < 5  # a second on an idle machine
    assert [f.code for f in caught.value.findings] == [code]
    assert int(caught.value.exit_code) == exit_code
    finding = caught.value.findings[0]
    assert finding.fact.endswith(".") and finding.todo.endswith(".") and len(finding.fact) < 220
    assert config_only(path, as_json=True) == exit_code


def test_missing_folder_link_and_special_file(tmp_path: Path) -> None:
    inside, outside = tmp_path / "model", tmp_path / "elsewhere.json"
    inside.mkdir()
    outside.write_bytes(good())
    (inside / "real.json").write_bytes(good())
    (inside / "here.json").symlink_to("real.json")
    (inside / "out.json").symlink_to(outside)
    (inside / "gone.json").symlink_to("nothing.json")
    os.mkfifo(inside / "pipe.json")
    for name in ("missing.json", ".", "gone.json", "pipe.json"):
        with pytest.raises(InputError) as caught:
            read_config(inside / name)
        assert caught.value.findings[0].code == "KV040"
    with pytest.raises(Refusal) as refused:
        read_config(inside / "out.json")
    assert refused.value.findings[0].code == "KV041"
    assert read_config(inside / "here.json") == GOOD


def test_infinite_time_steps_of_released_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "mamba2", "time_step_limit": [0.0, Infinity], "num_hidden_layers": 2}')
    assert understand(read_config(path), shown="c").layer_pattern == "LL"


def test_a_sticky_place_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type": "llama",\n  "x": tru\n}')
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert str(caught.value.findings[0].span) == "config.json:3:8"


def test_json_output_of_a_failure_is_one_object(tmp_path: Path) -> None:
    from kvskill.cli import cli

    path = tmp_path / "config.json"
    path.write_bytes(good(num_attention_heads=0))
    result = CliRunner().invoke(cli, ["analyze", "--config-only", str(path), "--json"], standalone_mode=False)
    assert result.return_value == 2
    data = json.loads(result.stdout)
    assert data["exit_code"] == 2 and [f["code"] for f in data["findings"]] == ["KV050"]
    assert "paging_verdict" not in data
    path.write_bytes(good(num_key_value_heads=3))
    result = CliRunner().invoke(cli, ["analyze", "--config-only", str(path), "--json"], standalone_mode=False)
    data = json.loads(result.stdout)
    assert result.return_value == 3 and data["paging_verdict"]["verdict"] == "legacy-keep"


def test_side_files_tell_of_quantised_caches(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}'
    )
    found, warnings = side_files(tmp_path)
    facts = understand(GOOD, shown="c.json", side=found, notes=warnings)
    assert facts.quant.method == "NVFP4" and facts.quant.kv_cache_quant == "quantization.kv_cache_quant_algo: FP8"
    assert any(f.code == "KV121" for f in facts.findings)
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "quant_model_description.json").write_text(
        '{"model_quant_type": "W8A8_DYNAMIC", "kv_quant_type": "C8", "group_size": 0}'
    )
    found, _ = side_files(tmp_path)
    assert understand(GOOD, shown="c", side=found).quant.kv_cache_quant == "kv_quant_type: C8"
    (tmp_path / "quant_model_description.json").write_text('{"model_quant_type": "W8A8", "kv_quant_type": null}')
    found, _ = side_files(tmp_path)
    assert understand(GOOD, shown="c", side=found).quant.kv_cache_quant is None
    (tmp_path / "quant_model_description.json").write_text("{")
    found, warnings = side_files(tmp_path)
    assert not found and [w.code for w in warnings] == ["KV132"]


def test_the_command_is_cheap(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(good())
    code = (
        "import sys\n"
        "from kvskill.analyzer.config.cli_report import config_only\n"
        "from pathlib import Path\n"
        f"assert config_only(Path({str(path)!r}), True) == 0\n"
        "heavy = {'torch', 'transformers', 'libcst', 'pydantic', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
