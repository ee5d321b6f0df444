"""torch_npu releases: the table, specifiers, places that name them, and the order of decision."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import kvskill
from kvskill.analyzer.data import load_json
from kvskill.analyzer.target.environment import probe_operators
from kvskill.analyzer.target.releases import FA_V2, has_operator, known_releases, read_mentions, select, version_key
from kvskill.diagnostics import InputError, Severity


def test_table_agrees_with_the_schema_table() -> None:
    """The projection must say what the full schema table says (the verifier ships it)."""
    path = Path(kvskill.__file__).parent / "verifier" / "data" / "op_schemas.json"
    table, ours = json.loads(path.read_text(encoding="utf-8")), load_json("op_availability.json")
    assert set(ours["releases"]) == set(table["releases"])
    for release, train in ours["releases"].items():
        bare = {
            table["schemas"][i].split("(")[0].split(".")[0] for i in table["sets"][table["releases"][release]["set"]]
        }
        listed = set(ours["trains"][train]["operators"])
        assert listed == bare & set(ours["operators"]), release


def test_known_differences() -> None:
    assert has_operator("2.6.0", FA_V2) is False
    assert has_operator("2.6.0.post3", FA_V2) is True
    assert has_operator("2.6.0.post1", FA_V2) is None  # between one without and one with
    assert has_operator("2.6.0.post4", FA_V2) is True  # after one that has it
    assert has_operator("2.11.0rc1", FA_V2) is None  # before every final of its line
    assert has_operator("2.99.0", FA_V2) is True
    assert has_operator("2.0.1", FA_V2) is None
    assert known_releases() == tuple(sorted(known_releases(), key=version_key))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("==2.6.0", ("2.6.0",)),
        ("===2.6.0.post3", ("2.6.0.post3",)),
        ("==2.6.*", ("2.6.0", "2.6.0.post3", "2.6.0.post5")),
        ("~=2.6.0", ("2.6.0", "2.6.0.post3", "2.6.0.post5")),
        (">=2.6.0,<2.7.1", ("2.6.0", "2.6.0.post3", "2.6.0.post5")),
        (">2.6.0,<=2.6.0.post3", ("2.6.0.post3",)),
    ],
)
def test_specifiers(spec: str, expected: tuple[str, ...]) -> None:
    assert select(spec) == expected


LINE_2_6 = ("2.6.0", "2.6.0.post3", "2.6.0.post5")


@pytest.mark.parametrize(
    ("line", "pins", "kind", "releases"),
    [
        ("torch==2.6.0", True, "pin", LINE_2_6),
        ("torch==2.6.0+cpu  # cpu wheel", True, "pin", LINE_2_6),
        ("torch_npu==2.6.0", True, "pin", ("2.6.0",)),
        ("torch-npu==2.10.0.post4", True, "pin", ("2.10.0.post4",)),
        ('  "torch-npu>=2.14.0",', True, "pin", ("2.14.0",)),
        ("RUN pip install torch_npu-2.6.0.post3-cp311-cp311-manylinux_2_28_aarch64.whl", True, "pin", ("2.6.0.post3",)),
        ("下载`torch_npu-2.8.0.post4-cp311-cp311-x.whl`安装包", False, "wheel", ("2.8.0.post4",)),
        ("pip install torch_npu==2.10.0.post4", False, "wheel", ("2.10.0.post4",)),
        ("环境：CANN 8.1 + PyTorch 2.6.0", False, "prose", LINE_2_6),
        ("环境：torch_npu 2.6.0", False, "prose", LINE_2_6),
        ("| torch_npu | 7.0.0 |", False, "prose", ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1")),
        (
            "支持的Ascend Extension for PyTorch版本为`7.0.0`。",
            False,
            "prose",
            ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1"),
        ),
    ],
)
def test_mentions(line: str, pins: bool, kind: str, releases: tuple[str, ...]) -> None:
    found = [m for m in read_mentions(f"\n{line}\n", "f", pins=pins) if m.kind == kind]
    assert found and found[0].releases == releases and found[0].ref == "f:2"


@pytest.mark.parametrize(
    "line", ["transformers==2.6.0", "mytorch==2.6.0", "torchvision==0.21.0", "pytest 2.6.0", "torchair 2.6.0"]
)
def test_other_packages_do_not_count(line: str) -> None:
    assert read_mentions(line, "f", pins=True) == []
    assert read_mentions(line, "f", pins=False) == []


def _repo(tmp_path: Path, *, pin: str = "", readme: str = "", code: str = "") -> tuple[Path, Path]:
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    if pin:
        (model / "requirements.txt").write_text(pin)
    if readme:
        (model / "README.md").write_text(readme)
    if code:
        other = tmp_path / "models" / "other"
        other.mkdir()
        (other / "modeling_other.py").write_text(code)
    return tmp_path, model


V2 = "import torch\nx = torch.ops.npu.npu_fused_infer_attention_score_v2\n"
V1 = "import torch\nx = torch.ops.npu.npu_fused_infer_attention_score\n"


@pytest.mark.parametrize(
    ("pin", "readme", "code", "version", "source"),
    [
        ("torch==2.8.0", "", "", 2, "pin"),
        ("torch==2.5.1", "", "", 1, "pin"),
        ("torch==2.6.0", "", V2, 2, "pin"),  # the set differs: calls decide
        ("torch==2.6.0", "torch_npu-2.6.0-cp311-cp311-x.whl", V2, 2, "pin"),  # calls before the wheel name
        ("torch==2.6.0", "torch_npu-2.6.0.post3-cp311-cp311-x.whl", V1, 1, "pin"),
        ("torch==2.6.0", "torch_npu-2.6.0.post3-cp311-cp311-x.whl", "", 2, "wheel"),
        ("torch==2.6.0", "torch_npu-2.6.0-cp311-cp311-x.whl", "", 1, "wheel"),
        ("torch==2.6.0", "", "", None, "pin"),  # asked
        ("", "torch_npu-2.6.0.post3-cp311-cp311-x.whl", "", 2, "wheel"),
        ("", "", V2, 2, "calls"),
        ("", "", "", 2, "assumed"),
        ("", "", V1, 2, "assumed"),
    ],
)
def test_order_of_decision(tmp_path: Path, pin: str, readme: str, code: str, version: int | None, source: str) -> None:
    repo, model = _repo(tmp_path, pin=pin, readme=readme, code=code)
    facts = probe_operators(repo, model, None, use_installed=False)
    assert (facts.fa_version, facts.source) == (version, source)
    assert facts.reason
    blocking = [f.code for f in facts.findings if f.severity is Severity.BLOCKING]
    assert blocking == (["KV061"] if version is None else [])
    assert ("KV062" in [f.code for f in facts.findings]) is (source == "assumed")


def test_text_in_comments_and_strings_is_no_call(tmp_path: Path) -> None:
    repo, model = _repo(
        tmp_path,
        pin="torch==2.6.0",
        code='# npu_fused_infer_attention_score_v2\nx = "npu_fused_infer_attention_score_v2"\n',
    )
    assert probe_operators(repo, model, None, use_installed=False).fa_version is None


def test_option_wins_and_is_checked(tmp_path: Path) -> None:
    repo, model = _repo(tmp_path, pin="torch==2.8.0")
    facts = probe_operators(repo, model, "2.6.0", use_installed=False)
    assert facts.fa_version == 1 and facts.source == "option"
    assert [f.code for f in facts.findings] == ["KV063"]
    for wrong in ("9.9.9", "abc", "==1.0.0"):
        with pytest.raises(InputError) as caught:
            probe_operators(repo, model, wrong, use_installed=False)
        assert caught.value.findings[0].code == "KV060"


def test_installed_wheel_counts_last_without_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, model = _repo(tmp_path, pin="torch==2.5.1")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kvskill.analyzer.target.environment._has_cann", lambda: False)
    assert probe_operators(repo, model, None).source == "pin"
    monkeypatch.setattr("kvskill.analyzer.target.environment._has_cann", lambda: True)
    on_device = probe_operators(repo, model, None)
    assert on_device.source == "installed" and [f.code for f in on_device.findings] == ["KV063"]


def test_nothing_here_imports_torch_npu() -> None:
    spec = importlib.util.find_spec("kvskill.analyzer.target.environment")
    assert spec is not None and "import torch" not in Path(spec.origin or "").read_text()


@pytest.mark.parametrize("line", ["PyTorch 1.11.0", "torch_npu 5.0.1", "torch_npu 99.0.0"])
def test_unknown_numbers_in_prose_say_nothing(line: str) -> None:
    assert read_mentions(line, "f", pins=False) == []
