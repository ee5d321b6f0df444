"""SKILL.md and its companions: format, budgets, versions, and why a skill does not load in the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from skills_ref import validate as reference_validate

import kvskill
from kvskill.skillpack import estimate_tokens, role_texts, skill_folder, validate_skill
from kvskill.skillpack.frontmatter import split_frontmatter

ROOT = Path(__file__).resolve().parents[2]
HEAD = "---\nname: {name}\ndescription: {description}\n---\n\n# Body\n"


def fields_and_body() -> tuple[dict[str, object], str]:
    return split_frontmatter((skill_folder() / "SKILL.md").read_text(encoding="utf-8"))


def test_valid_for_us_and_for_the_reference_validator() -> None:
    assert [str(f) for f in validate_skill(skill_folder())] == []
    assert reference_validate(skill_folder()) == []


def test_budgets() -> None:
    fields, body = fields_and_body()
    assert body.count("\n") < 250
    assert estimate_tokens(body) < 3000
    assert 300 < len(str(fields["description"])) <= 1024


def test_triggers_in_both_languages() -> None:
    description = str(fields_and_body()[0]["description"])
    wanted = [
        "KVCache",
        "分页注意力",
        "KV 压缩",
        "FA 融合算子",
        "OOM",
        "block_table",
        "slot_mapping",
        "框架部署",
        "独立部署",
    ]
    wanted += ["paged attention", "Use when", "Not for", "MLA", "SlidingWindow"]
    assert [w for w in wanted if w not in description] == []


def test_one_version_everywhere() -> None:
    found = {
        "skill": fields_and_body()[0]["metadata"]["version"],  # type: ignore[index]
        "claude plugin": json.loads((ROOT / ".claude-plugin/plugin.json").read_text())["version"],
        "codex plugin": json.loads((ROOT / ".codex-plugin/plugin.json").read_text())["version"],
    }
    market = json.loads((ROOT / ".claude-plugin/marketplace.json").read_text())
    found["marketplace"] = market["metadata"]["version"]
    found["marketplace entry"] = market["plugins"][0]["version"]
    assert found == dict.fromkeys(found, kvskill.__version__)


def test_plugin_manifests_name_existing_files() -> None:
    claude = json.loads((ROOT / ".claude-plugin/plugin.json").read_text())
    codex = json.loads((ROOT / ".codex-plugin/plugin.json").read_text())
    paths = [*claude["agents"], codex["skills"]]
    assert all(p.startswith("./") and (ROOT / p).exists() for p in paths)
    assert "skills" not in claude  # the default folder skills/ is found by itself


def test_roles() -> None:
    for role, text in role_texts().items():
        fields, body = split_frontmatter(text)
        assert set(fields) == {"name", "description"} and fields["name"] == f"kvcache-{role}"
        assert len(fields["description"]) <= 1024 and estimate_tokens(body) < 1500
        assert "progress.md" in body and "append only" in body


@pytest.mark.parametrize(
    ("text", "tokens"),
    [  # counted with cl100k_base
        ("按模型 attention 形态选择 KVCache 模式与算子组合，并完成代码改造与验证。", 26),
        ("Paged 4-D cache is `[num_blocks, N_kv, block_size, D]`, view it to 3-D.", 27),
        ("torch_npu.npu_fused_infer_attention_score_v2(softmax_scale=self.scaling)", 20),
    ],
)
def test_token_estimate_is_conservative(text: str, tokens: int) -> None:
    assert tokens <= estimate_tokens(text) <= 1.6 * tokens


BROKEN = {
    "upper_case": (HEAD.format(name="Upper_Case", description="x"), "`name` is not"),
    "renamed": (HEAD.format(name="other-name", description="x"), "the folder is"),
    "long-text": (HEAD.format(name="long-text", description="x" * 1025), "1 to 1024"),
    "bad-yaml": (HEAD.format(name="bad-yaml", description="what: a colon"), "not valid YAML"),
    "script-path": (
        HEAD.format(name="script-path", description="x") + "\nRun `./scripts/run.sh` now.\n",
        "relative path",
    ),
    "no-head": ("# Body\n", "first line is not"),
    "not-closed": ("---\nname: not-closed\ndescription: x\n", "not closed"),
    "hyphens": (HEAD.format(name="hyphens", description="a --- b"), "three hyphens"),
    "flow": ("---\nname: flow\ndescription: x\nmetadata: {a: b}\n---\nx\n", "flow style"),
    "twice": ("---\nname: twice\ndescription: x\ndescription: y\n---\nx\n", "given twice"),
    "extra": ("---\nname: extra\ndescription: x\nmode: subagent\n---\nx\n", "unknown fields"),
    "number": ("---\nname: number\ndescription: x\nmetadata:\n  version: 1.0\n---\nx\n", "text to text"),
    "link": (HEAD.format(name="link", description="x") + "[a](references/none.md)\n", "does not resolve"),
    "long-body": (HEAD.format(name="long-body", description="x") + "line\n" * 260, "lines"),
    "many-tokens": (HEAD.format(name="many-tokens", description="x") + "键值缓存" * 700, "tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_skill_is_named(name: str, tmp_path: Path) -> None:
    text, expected = BROKEN[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "SKILL.md").write_text(text, encoding="utf-8")
    found = validate_skill(folder)
    assert any(expected in f.fact for f in found), [str(f) for f in found]
    assert all(f.code == "KV093" for f in found)


def test_good_skill_passes(tmp_path: Path) -> None:
    folder = tmp_path / "good-skill"
    folder.mkdir()
    (folder / "SKILL.md").write_text(HEAD.format(name="good-skill", description="x"))
    assert validate_skill(folder) == [] and reference_validate(folder) == []


def test_validated_from_a_foreign_folder_without_execute_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "elsewhere" / skill_folder().name
    shutil.copytree(skill_folder(), copy)
    for path in copy.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    monkeypatch.chdir(tmp_path)
    assert validate_skill(copy) == []


def test_reference_without_its_condition_is_named(tmp_path: Path) -> None:
    copy = tmp_path / skill_folder().name
    shutil.copytree(skill_folder(), copy)
    (copy / "references/operators.md").write_text("# Operators\n")
    (copy / "references/deep").mkdir()
    (copy / "references/deep/x.md").write_text("Read this when x.\n")
    facts = " ".join(f.fact for f in validate_skill(copy))
    assert "when to read" in facts and "one level" in facts


def test_old_version_is_named() -> None:
    assert any("version" in f.fact for f in validate_skill(skill_folder(), version="9.9.9"))
