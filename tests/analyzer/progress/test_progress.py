"""progress.md as people really write it: both languages, fences, tables, encodings; and the append-only record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvskill.analyzer.progress import find_progress, read_facts, read_progress_text, record_decisions
from kvskill.diagnostics import InputError, Severity

TEMPLATE = """## 模型信息

### 运行环境
- NPU 型号:
- 单卡 HBM:
- 部署卡数:
- 执行模式:

### 模型架构
（架构类型与关键参数）

### 模型当前状态
（可运行/不可运行/需多卡，缺失项）

## 进度概览

| 阶段 | 结论 | 性能变化 |
|------|------|---------|
| 阶段 2：KVCache 优化 | - | - |
"""


def _facts(tmp_path: Path, text: str | bytes):
    path = tmp_path / "progress.md"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_facts(read_progress_text(path, "progress.md"))


@pytest.mark.parametrize(
    ("text", "mode", "line"),
    [
        ("部署模式: 框架部署\n", "framework", 1),
        ("部署模式：独立部署\n", "standalone", 1),
        ("# x\n\n- **部署模式**：`独立部署`（仓外使用）\n", "standalone", 3),
        ("1. 部署模式 : 框架部署（推荐）\n", "framework", 1),
        ("> - 部署模式：框架部署\n", "framework", 1),
        ("| 项目 | 值 |\n|---|---|\n| 部署模式 | 独立部署 |\n", "standalone", 3),
        ("| 部署模式 | 部署卡数 |\n|:--|--:|\n| 框架部署 | 8 |\n", "framework", 3),
        ("- Deployment mode: standalone\n", "standalone", 1),
        ("**Deployment Mode:** Framework deployment\n", "framework", 1),
        ("````markdown\n# 模型\n部署模式：独立部署\n````\n", "standalone", 3),
        ("```\n- 部署模式：框架部署\n", "framework", 2),
        ("```markdown\n部署模式：独立部署\n```yaml\n部署模式: 框架部署\n```\n完\n```\n", "standalone", 2),
        ("\ufeff部署模式：独立部署\r\n", "standalone", 1),
        ("#### 部署模式：独立部署\n", "standalone", 1),
    ],
)
def test_deployment_in_its_forms(tmp_path: Path, text: str, mode: str, line: int) -> None:
    facts = _facts(tmp_path, text)
    assert facts.deployment == mode and facts.deployment_at is not None and facts.deployment_at.line == line
    assert facts.findings == ()


@pytest.mark.parametrize(
    "text",
    [
        TEMPLATE,
        "",
        "部署模式:\n",
        "部署模式: {框架部署 / 独立部署}\n",
        "部署模式: 框架部署 / 独立部署\n",
        "部署模式: （框架部署/独立部署）\n",
        "<!-- 部署模式: 独立部署 -->\n",
        "<!--\n部署模式: 独立部署\n-->\n",
        "# x\n一些话\n一些话\n一些话\n一些话\n```\n部署模式: 独立部署\n```\n",
        "本模型不采用独立部署。\n",
    ],
)
def test_placeholders_comments_and_examples_say_nothing(tmp_path: Path, text: str) -> None:
    facts = _facts(tmp_path, text)
    assert facts.deployment is None and facts.findings == ()


def test_contradiction_is_a_finding_with_both_lines(tmp_path: Path) -> None:
    facts = _facts(tmp_path, "- 部署模式：框架部署\n\n- 部署模式：独立部署\n")
    (finding,) = facts.findings
    assert facts.deployment is None
    assert (finding.code, finding.severity, finding.span.line) == ("KV021", Severity.BLOCKING, 3)
    assert "line 1" in finding.fact and "line 3" in finding.fact


def test_unknown_mode_is_said(tmp_path: Path) -> None:
    facts = _facts(tmp_path, "部署模式：云端部署\n")
    assert [f.code for f in facts.findings] == ["KV022"]


def test_hardware_architecture_and_state(tmp_path: Path) -> None:
    text = (
        "### 运行环境\n- NPU 型号：Ascend 910C (Atlas A3)\n"
        "- 单卡 HBM: 64 GB\n- 部署卡数: 16\n- 执行模式: **ge_graph**\n"
        "### 模型架构\n| 项目 | 值 |\n|--|--|\n| Attention 类型 | GQA（8 KV heads） |\n"
        "### 模型当前状态\n单卡框架适配完成，需多卡并行化\n"
    )
    facts = _facts(tmp_path, text)
    assert facts.language == "zh" and facts.attention == "GQA" and facts.state == "needs-cards"
    said = {k: facts.first(k).value for k in ("npu", "hbm", "cards", "exe_mode")}
    assert said == {"npu": "Ascend 910C (Atlas A3)", "hbm": "64 GB", "cards": "16", "exe_mode": "ge_graph"}


def test_template_as_it_comes_is_empty(tmp_path: Path) -> None:
    facts = _facts(tmp_path, f"````markdown\n{TEMPLATE}````\n")
    assert facts.values == {} and facts.state is None and facts.language == "zh"


def test_both_kinds_of_attention_are_no_answer(tmp_path: Path) -> None:
    assert _facts(tmp_path, "- Attention 类型: GQA/MHA/MLA\n").attention is None


def test_encodings(tmp_path: Path) -> None:
    assert _facts(tmp_path, "部署模式：独立部署\n".encode("gb18030")).deployment == "standalone"
    for raw in (b"\x00\x01\x02", b"\xff\xfe\x00"):
        with pytest.raises(InputError) as caught:
            _facts(tmp_path, raw)
        assert caught.value.findings[0].code == "KV020"


def test_files_are_found_in_order_and_links_out_are_not(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "agentic").mkdir(parents=True)
    (model / "progress.md").write_text("x")
    assert find_progress(model)[0] == model / "progress.md"
    (model / "agentic" / "progress.md").write_text("y")
    assert find_progress(model)[0] == model / "agentic" / "progress.md"
    assert len(find_progress(model)[1]) == 2
    outside = tmp_path / "outside.md"
    outside.write_text("z")
    (model / "agentic" / "progress.md").unlink()
    (model / "progress.md").unlink()
    (model / "progress.md").symlink_to(outside)
    assert find_progress(model) == (None, ())


ROWS = {"zh": [("KV 模式", "Paged", "规则 | a")], "en": [("KV mode", "Paged", "rule | a")]}


@pytest.mark.parametrize(
    "before",
    [
        b"",
        TEMPLATE.encode(),
        f"````markdown\n{TEMPLATE}````\n".encode(),
        "部署模式：框架部署".encode(),  # no newline at the end
        "部署模式：框架部署\r\n- x\r\n".encode(),
        "部署模式：框架部署\n".encode("gb18030"),
        b"# Model\n- Deployment mode: framework\n",
        "\ufeff# 模型\n".encode(),
    ],
)
def test_record_appends_only_and_once(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "progress.md"
    path.write_bytes(before)
    path.chmod(0o600)
    first = record_decisions(path, "progress.md", ROWS, root=tmp_path)
    after = path.read_bytes()
    assert first.written and after.startswith(before) and len(after) > len(before)
    assert path.stat().st_mode & 0o777 == 0o600
    again = record_decisions(path, "progress.md", ROWS, root=tmp_path)
    assert not again.written and path.read_bytes() == after
    text = read_progress_text(path, "p")
    added = after[len(before) :].decode("utf-8" if text.encoding == "utf-8-sig" else text.encoding)
    assert ("阶段 2" in added) is (text.language == "zh") and "\\|" in added
    if b"\r\n" in before:
        assert "\n" not in added.replace("\r\n", "")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".progress")]


def test_changed_decisions_are_a_new_section(tmp_path: Path) -> None:
    path = tmp_path / "progress.md"
    record_decisions(path, "progress.md", ROWS, root=tmp_path)
    one = path.read_bytes()
    other = {"zh": [("KV 模式", "Legacy", "x")], "en": [("KV mode", "Legacy", "x")]}
    assert record_decisions(path, "progress.md", other, root=tmp_path).written
    assert path.read_bytes().startswith(one) and path.read_text().count("## 阶段 2") == 2


def test_open_fence_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "progress.md"
    path.write_text("````markdown\n部署模式：框架部署\n")
    record_decisions(path, "progress.md", ROWS, root=tmp_path)
    assert path.read_text().splitlines()[2] == "````"
    assert read_facts(read_progress_text(path, "p")).deployment == "framework"


def test_own_record_is_no_evidence(tmp_path: Path) -> None:
    """Otherwise the first answer would prove itself the next time."""
    path = tmp_path / "progress.md"
    rows = {"zh": [("部署模式", "框架部署", "x")], "en": []}
    record_decisions(path, "progress.md", rows, root=tmp_path)
    assert read_facts(read_progress_text(path, "p")).deployment is None
    with path.open("a") as out:
        out.write("\n### 后续\n- 部署模式：独立部署\n")
    assert read_facts(read_progress_text(path, "p")).deployment == "standalone"


def test_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.md"
    path.write_text("部署模式：框架部署\n")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(InputError) as caught:
        record_decisions(path, "progress.md", ROWS, root=tmp_path)
    assert caught.value.findings[0].code == "KV023"
    assert path.read_text() == "部署模式：框架部署\n" and len(list(tmp_path.iterdir())) == 1


def test_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    outside = tmp_path / "o.md"
    outside.write_text("x")
    (model / "progress.md").symlink_to(outside)
    with pytest.raises(InputError):
        record_decisions(model / "progress.md", "progress.md", ROWS, root=model)
    assert outside.read_text() == "x"
