"""Follow SKILL.md's own commands, and nothing else, on a Legacy model: the end is a verified conversion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvskill.embedded import materialise

SKILL = "model-infer-kvcache"
MODEL = "models/tiny_dense"


def run(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One command line of the skill with the interpreter of this test."""
    words = line.replace("MODEL", MODEL).split()
    assert words[0] == "kvskill"
    code = "from kvskill.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *words[1:]],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def section(text: str, title: str) -> list[str]:
    """The command lines of the first bash fence below a heading."""
    body = text.split(f"## {title}\n")[1].split("\n## ")[0]
    fence = re.search(r"^```bash\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
    assert fence, title
    return fence[1].splitlines()


def files(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and ".git" not in p.parts and "__pycache__" not in p.parts and ".kvskill" not in p.parts
    }


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A target repository with a Legacy model, committed, and the skill installed in it."""
    root = materialise(tmp_path / "repo", era="2026-04", models=["tiny_dense"])
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        subprocess.run([*git, *args], cwd=root, check=True)
    assert run("kvskill skill install --client agents", root).returncode == 0
    return root


def test_the_loop_ends_verified(repo: Path) -> None:
    text = (repo / f".agents/skills/{SKILL}/SKILL.md").read_text(encoding="utf-8")
    loop = section(text, "The loop")
    assert [line.split()[1] for line in loop] == ["analyze", "analyze", "apply", "apply", "verify"]
    before = files(repo)
    for line in loop:
        done = run(line, repo)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    after = files(repo)
    changed = {p for p in {*before, *after} if before.get(p) != after.get(p)}
    assert changed and all(p.startswith(MODEL + "/") for p in changed), changed
    modeling = next(p for p in changed if "/modeling_" in p)
    assert b"get_cache_info" in after[modeling]
    progress = f"{MODEL}/progress.md"
    assert after[progress].startswith(before[progress].rstrip()) and len(after[progress]) > len(before[progress])

    again = run("kvskill apply MODEL", repo)
    assert again.returncode == 0 and "nothing to do" in again.stdout.lower()
    undo = run("kvskill undo MODEL", repo)
    assert undo.returncode == 0, undo.stderr
    assert files(repo)[modeling] == before[modeling]


def test_a_refused_model_stops_the_loop(repo: Path) -> None:
    modeling = next((repo / MODEL / "models").glob("modeling_*.py"))
    text = modeling.read_text(encoding="utf-8")
    # two attentions over the same keys: the cache code between them has no single seam
    call = "attn_output = F.scaled_dot_product_attention("
    assert text.count(call) == 1, "the fixture's attention changed"
    second = "local = F.scaled_dot_product_attention(query_states, key_states, value_states, scale=self.scaling)"
    both = f"{second}\n        attn_output = 0.5 * local + 0.5 * F.scaled_dot_product_attention("
    modeling.write_text(text.replace(call, both), encoding="utf-8")
    before = files(repo)
    run("kvskill analyze MODEL", repo)
    refused = run("kvskill apply MODEL", repo)
    assert refused.returncode == 3, refused.stderr
    assert re.search(rf"{modeling.name}:\d+:\d+: \w+ KV\d{{3}}: ", refused.stdout + refused.stderr)
    after = files(repo)
    assert {p for p in after if before.get(p) != after[p]} <= {f"{MODEL}/kv_manifest.yaml"}


def test_manual_section_names_commands_of_the_tool() -> None:
    from kvskill.skillpack import skill_folder

    text = (skill_folder() / "SKILL.md").read_text(encoding="utf-8")
    lines = section(text, "manual[] tasks")
    assert lines[0] == "kvskill template list" and lines[-2:] == ["kvskill apply MODEL", "kvskill verify MODEL"]
