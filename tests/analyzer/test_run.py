"""`kvskill analyze` end to end, on the embedded target and on broken input."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from kvskill.analyzer.run import AnalyzeRequest, analyze
from kvskill.cli import main
from kvskill.diagnostics import ExitCode
from kvskill.embedded import materialise
from kvskill.manifest import load_manifest

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return materialise(tmp_path / "repo", "2026-04", ["tiny_dense"])


def _run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *map(str, args)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_tiny_dense_is_decided(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "tiny_dense", "--repo", repo)
    assert (code, err) == (0, "")
    assert out.startswith("tiny_dense: convert to Paged\n")
    for part in ("Found", "Decided", "Groups", "Memory per rank", "Will not do", "kvskill apply tiny_dense --diff"):
        assert part in out
    manifest = load_manifest(repo / "models/tiny_dense/kv_manifest.yaml")
    assert manifest.model.state == "legacy" and manifest.model.causal_lm == "TinyDenseForCausalLM"
    assert manifest.target.block_size_on == "model" and manifest.deployment.value == "framework"
    assert manifest.memory is not None and manifest.memory.blocks == {"FullAttention": 4 * 3 + 1}
    for item in manifest.inputs:
        assert hashlib.sha256((repo / item.path).read_bytes()).hexdigest() == item.sha256
    paths = {i.path for i in manifest.inputs}
    assert {"models/tiny_dense/config.json", "models/tiny_dense/progress.md"} <= paths
    assert str(repo) not in (repo / "models/tiny_dense/kv_manifest.yaml").read_text()


def test_same_input_same_bytes(repo: Path) -> None:
    request = AnalyzeRequest("tiny_dense", repo=repo)
    path = analyze(request).written
    assert path is not None
    first, stamp = path.read_bytes(), path.stat().st_mtime_ns
    analyze(request)
    assert path.read_bytes() == first and path.stat().st_mtime_ns == stamp
    other = materialise(repo.parent / "elsewhere", "2026-04", ["tiny_dense"])
    again = analyze(AnalyzeRequest(str(other / "models/tiny_dense"))).written
    assert again is not None and again.read_bytes() == first


def test_found_from_inside_by_name_and_by_path(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo / "models")
    by_name = analyze(AnalyzeRequest("tiny_dense", write=False)).manifest
    monkeypatch.chdir(repo / "models/tiny_dense")
    by_path = analyze(AnalyzeRequest(".", write=False)).manifest
    assert by_name == by_path


def test_json_is_one_object(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys, "tiny_dense", "--repo", repo, "--json", "--no-write", "--what-if", "batch=8,len=100,new=28"
    )
    data = json.loads(out)
    assert code == data["exit_code"] == 0 and data["manifest"]["kv_mode"]["value"] == "paged"
    assert data["what_if"]["blocks"] == {"FullAttention": 8 + 1} and data["written"] is None
    assert not (repo / "models/tiny_dense/kv_manifest.yaml").exists()


def test_overrides_survive_and_win(repo: Path) -> None:
    path = repo / "models/tiny_dense/kv_manifest.yaml"
    analyze(AnalyzeRequest("tiny_dense", repo=repo))
    data = yaml.safe_load(path.read_text())
    data["overrides"].update(fa_version=1, block_size=64, window="upstream")
    data["an_unknown_field_of_another_version"] = 1
    path.write_text(yaml.safe_dump(data))
    again = analyze(AnalyzeRequest("tiny_dense", repo=repo)).manifest
    assert (again.fa_version.value, again.block_size.value, again.window_rule.value) == (1, 64, "upstream")
    assert load_manifest(path).overrides == again.overrides
    path.write_text("overrides: {fa_version: 7}\n")
    with pytest.raises(Exception, match="fa_version"):
        analyze(AnalyzeRequest("tiny_dense", repo=repo))
    assert path.read_text() == "overrides: {fa_version: 7}\n"


def test_record_appends_and_settles(repo: Path) -> None:
    progress = repo / "models/tiny_dense/progress.md"
    before = progress.read_bytes()
    first = analyze(AnalyzeRequest("tiny_dense", repo=repo, record=True))
    after = progress.read_bytes()
    assert after.startswith(before) and "阶段 2" in after[len(before) :].decode()
    assert first.recorded is not None and first.recorded.written and first.written is not None
    manifest = first.written.read_bytes()
    second = analyze(AnalyzeRequest("tiny_dense", repo=repo, record=True))
    assert second.recorded is not None and not second.recorded.written
    assert progress.read_bytes() == after and first.written.read_bytes() == manifest
    assert str(repo) not in after.decode()


def test_mode_options(repo: Path) -> None:
    def mode(**kw: object) -> tuple[str, str]:
        decided = analyze(AnalyzeRequest("tiny_dense", repo=repo, write=False, **kw)).manifest.deployment  # type: ignore[arg-type]
        return decided.value, decided.source

    assert mode() == ("framework", "progress")
    assert mode(mode="standalone") == ("standalone", "option")
    assert mode(prompt="工作目录: x\n部署模式: 独立部署") == ("standalone", "option")


def test_a_target_that_cannot_page_keeps_legacy(tmp_path: Path) -> None:
    repo = materialise(tmp_path / "old", "2026-03", ["tiny_moe2d"])
    result = analyze(AnalyzeRequest("tiny_moe2d", repo=repo, write=False))
    assert result.manifest.kv_mode.value == "legacy" and "CacheEntry" in result.manifest.kv_grounds[0]


def test_config_order(repo: Path, tmp_path: Path) -> None:
    folder = repo / "models/tiny_dense"

    def source(**kw: object) -> tuple[str, str]:
        base = analyze(AnalyzeRequest("tiny_dense", repo=repo, write=False, **kw)).base  # type: ignore[arg-type]
        return base.source.kind, base.source.shown

    assert source() == ("yaml", "models/tiny_dense/config.json")
    given = tmp_path / "given" / "config.json"
    given.parent.mkdir()
    given.write_text((folder / "config.json").read_text())
    assert source(config=given)[0] == source(config=given.parent)[0] == "option"
    manifest = analyze(AnalyzeRequest("tiny_dense", repo=repo, write=False, config=given)).manifest
    assert manifest.model.config_file is not None
    assert (repo / manifest.model.config_file).resolve() == given.resolve()
    for path in (folder / "config").glob("*.yaml"):
        path.write_text(path.read_text().replace("models/tiny_dense", "/no/such/place"))
    assert source()[0] == "folder"
    (folder / "config.json").unlink()
    kind, shown = source()
    assert kind == "class" and shown.startswith("models/tiny_dense/models/configuration_")


# broken input: one clear finding each, exit 2 or 3, no traceback, in under a second -----------------------------------


def _break_config(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def _with(**changes: object) -> str:
    return json.dumps({**CONFIG, **changes})


BROKEN_CONFIGS = {
    "truncated": json.dumps(CONFIG)[:-20],
    "list": "[1, 2]",
    "nan": _with(rope_theta=float("nan")),
    "wrong-types": _with(num_attention_heads="two"),
    "negative-layers": _with(num_hidden_layers=-2),
    "huge": '{"a": "' + "x" * 10_000_000 + '"}',
    "empty": "",
    "binary": b"\x00\xff\x00",
}


@contextmanager
def _under_a_second() -> Iterator[None]:
    """Of processor time, and without collecting what earlier tests of this process left."""
    gc.disable()
    start = time.process_time()
    try:
        yield
        assert time.process_time() - start < 1
    finally:
        gc.enable()


@pytest.mark.parametrize("name", list(BROKEN_CONFIGS))
def test_broken_configs(name: str, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _break_config(repo / "models/tiny_dense", BROKEN_CONFIGS[name])
    with _under_a_second():
        code, _, err = _run(capsys, "tiny_dense", "--repo", repo)
    assert code in (2, 3) and len(err.strip().splitlines()) == 1 and "KV" in err and "Traceback" not in err
    assert not (repo / "models/tiny_dense/kv_manifest.yaml").exists()


def _missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    for path in folder.rglob("configuration_*.py"):
        path.unlink()
    for path in (folder / "config").glob("*.yaml"):
        path.write_text(path.read_text().replace("models/tiny_dense", "/no/such/place"))


def _no_attention(folder: Path) -> None:
    for path in (folder / "models").glob("modeling_*.py"):
        path.write_text("import torch\n\n\ndef helper():\n    return 1\n")


def _two_files(folder: Path) -> None:
    source = next((folder / "models").glob("modeling_*.py"))
    (folder / "models" / "modeling_other.py").write_text(source.read_text().replace("TinyDense", "Other"))
    for registry in folder.parents[1].rglob("support_models.py"):
        registry.write_text("model_dict = {}\n")


def _link_out(folder: Path) -> None:
    source = next((folder / "models").glob("modeling_*.py"))
    outside = folder.parents[2] / "outside.py"
    outside.write_text(source.read_text())
    source.unlink()
    source.symlink_to(outside)


def _syntax(folder: Path) -> None:
    next((folder / "models").glob("modeling_*.py")).write_text("def broken(:\n")


def _config_link_out(folder: Path) -> None:
    outside = folder.parents[2] / "outside.json"
    outside.write_text(json.dumps(CONFIG))
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)


def _framework_link_out(folder: Path) -> None:
    repo = folder.parents[1]
    (repo / "executor").rename(repo.parent / "elsewhere")
    (repo / "executor").symlink_to(repo.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (_framework_link_out, "KV014"),
        (_missing_config, "KV017"),
        (_no_attention, "KV018"),
        (_two_files, "KV019"),
        (_link_out, "KV014"),
        (_syntax, "KV003"),
        (_config_link_out, "KV041"),
    ],
)
def test_broken_folders(change, number: str, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(repo / "models/tiny_dense")
    with _under_a_second():
        code, _, err = _run(capsys, "tiny_dense", "--repo", repo)
    assert code in (2, 3) and number in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "number"),
    [
        (("no_such_model",), "KV013"),
        (("tiny_dense", "--config", "nowhere.json"), "KV016"),
        (("tiny_dense", "--yaml", "nowhere.yaml"), "KV026"),
        (("tiny_dense", "--torch-npu", "one"), "KV060"),
        (("tiny_dense", "--what-if", "batch=zero"), "KV008"),
        (("tiny_dense", "--prompt", "部署模式: 框架部署 部署模式: 独立部署"), "KV024"),
    ],
)
def test_wrong_arguments(args: tuple[str, ...], number: str, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, *args, "--repo", repo)
    assert code == 2 and number in err


def test_missing_model_suggests(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean tiny_dense?" in _run(capsys, "tiny_dens", "--repo", repo)[2]


def test_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "F.json"
    path.write_text(json.dumps(CONFIG))
    code, out, _ = _run(capsys, "--config-only", path, "--json")
    assert code == 0 and json.loads(out)["paging_verdict"]["verdict"] == "paged"


def test_imports_are_light() -> None:
    code = (
        "import sys, kvskill.analyzer.run, kvskill.cli.analyze, kvskill.analyzer.report\n"
        "heavy = {'torch', 'libcst', 'numpy', 'transformers', 'rich', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_exit_codes_are_those_of_the_enum(repo: Path) -> None:
    assert analyze(AnalyzeRequest("tiny_dense", repo=repo, write=False)).exit_code is ExitCode.DONE
