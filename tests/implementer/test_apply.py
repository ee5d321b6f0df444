"""apply and undo: all files or none, nothing lost, twice is once."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvskill.diagnostics import ExitCode, InputError, Refusal
from kvskill.implementer import writer
from kvskill.implementer.writer import read_journal, undo

ERAS = ("2026-04", "2026-06", "2026-08")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and ".kvskill" not in p.parts and p.name != "kv_manifest.yaml"
    }


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe2d", "tiny_mixed"])
def test_converts_in_every_era(bench: Callable[..., Any], model: str, era: str) -> None:
    b = bench(model, era)
    text = b.convert()
    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    entries = [c for c in calls if c.func.id == "CacheEntry"]  # type: ignore[attr-defined]
    info = next(c for c in calls if c.func.id == "ModelCacheInfo")  # type: ignore[attr-defined]
    on_entry = [any(k.arg == "block_size" for k in c.keywords) for c in entries] + ["replace(entry" in text]
    assert any(on_entry) == (era != "2026-04")
    assert any(k.arg == "block_size" for k in info.keywords) == (era == "2026-04")
    assert all(not c.args for c in entries), "keywords only"
    assert ("register_group" in text) == (era != "2026-04")
    assert "self.cache_unit" not in text and "scatter_update_(" not in text.replace("npu_scatter_nd_update_(", "")


def test_twice_is_once(bench: Callable[..., Any]) -> None:
    b = bench()
    b.convert()
    before = snapshot(b.tree)
    b.analyze()
    done = b.apply()
    assert (done.status, done.exit_code) == ("nothing-to-do", ExitCode.DONE)
    assert snapshot(b.tree) == before


def test_diff_and_check_write_nothing(bench: Callable[..., Any]) -> None:
    b = bench()
    b.analyze()
    before = snapshot(b.tree)
    assert b.apply(mode="diff").exit_code is ExitCode.DONE
    assert b.apply(mode="check").exit_code is ExitCode.FOUND
    assert snapshot(b.tree) == before
    b.apply()
    assert b.apply(mode="check").exit_code is ExitCode.DONE


def test_undo_puts_every_byte_back(bench: Callable[..., Any]) -> None:
    b = bench()
    before = snapshot(b.tree)
    b.convert()
    assert snapshot(b.tree) != before
    undo(b.folder)
    assert snapshot(b.tree) == before
    with pytest.raises(InputError):
        undo(b.folder)


def test_undo_keeps_later_edits(bench: Callable[..., Any]) -> None:
    b = bench()
    b.convert()
    b.modeling.write_bytes(b.modeling.read_bytes() + b"# mine\n")
    with pytest.raises(Refusal):
        undo(b.folder)
    assert b.modeling.read_bytes().endswith(b"# mine\n")


def test_without_a_manifest(bench: Callable[..., Any]) -> None:
    with pytest.raises(InputError) as caught:
        bench().apply()
    assert caught.value.findings[0].code == "KV010"


def test_a_stale_manifest_is_noticed(bench: Callable[..., Any]) -> None:
    b = bench()
    b.analyze()
    b.modeling.write_bytes(b.modeling.read_bytes() + b"\n# changed\n")
    with pytest.raises(InputError) as caught:
        b.apply()
    assert caught.value.findings[0].code == "KV256"


def test_a_failing_write_puts_everything_back(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench()
    b.analyze()
    before = snapshot(b.tree)
    real = writer._atomic

    def broken(path: Path, data: bytes, like: Path | None) -> None:
        if path == b.modeling and data != before[b.modeling.relative_to(b.tree).as_posix()]:
            raise OSError(28, "No space left on device", str(path))
        real(path, data, like)

    monkeypatch.setattr(writer, "_atomic", broken)
    with pytest.raises(InputError) as caught:
        b.apply()
    assert caught.value.findings[0].code == "KV251"
    assert snapshot(b.tree) == before


def test_a_kill_in_mid_write_is_noticed_and_undone(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench()
    b.analyze()
    before = snapshot(b.tree)
    real = writer._atomic

    def killed(path: Path, data: bytes, like: Path | None) -> None:
        real(path, data, like)
        if path == b.modeling:
            raise KeyboardInterrupt  # no clean-up code of ours runs after a kill either

    monkeypatch.setattr(writer, "_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        b.apply()
    monkeypatch.undo()
    journal = read_journal(b.folder)
    assert journal is not None and journal.state == "writing"
    with pytest.raises(Refusal) as caught:
        b.apply()
    assert caught.value.findings[0].code == "KV254"
    undo(b.folder)
    assert snapshot(b.tree) == before


def test_uncommitted_changes_stop_the_write(bench: Callable[..., Any]) -> None:
    b = bench()
    git = ["git", "-C", str(b.tree), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for args in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *args], check=True, capture_output=True)
    b.modeling.write_bytes(b.modeling.read_bytes() + b"# mine\n")
    b.analyze()
    before = snapshot(b.tree)
    with pytest.raises(Refusal) as caught:
        b.apply()
    assert caught.value.findings[0].code == "KV258" and snapshot(b.tree) == before
    assert b.apply(force=True).status == "converted"


def test_a_broken_journal(bench: Callable[..., Any]) -> None:
    b = bench()
    b.convert()
    (b.folder / ".kvskill" / "apply.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        undo(b.folder)
    assert caught.value.findings[0].code == "KV250"
    assert json.dumps({}) == "{}"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_comments_and_lines_outside_edits(bench: Callable[..., Any], newline: bytes) -> None:
    b = bench()
    old = b.modeling.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", newline)
    b.modeling.write_bytes(old)
    b.convert()
    new = b.modeling.read_bytes()
    assert new.count(b"\n") == new.count(newline), "one kind of line end"
    comments = [line.strip() for line in old.splitlines() if line.strip().startswith(b"#")]
    missing = [c for c in comments if c not in [x.strip() for x in new.splitlines()]]
    # what they stand above is replaced by the paged call
    inside = (b"# Decode reads every row", b"# Prefill starts each row at 0")
    assert all(m.startswith(inside) for m in missing), missing


AMBIGUOUS = {
    "scaled value in the write": ("value_states.transpose(1, 2).reshape", "(value_states * 2).transpose(1, 2).reshape"),
    "positions counted over tokens": (
        "self.rotary_emb(hidden_states, position_ids)",
        "self.rotary_emb(hidden_states, torch.arange(input_ids.shape[1])[None])",
    ),
    "a test on the batch": (
        "        return self.o_proj(attn_output)",
        "        if bsz > 3:\n            attn_output = attn_output * 2\n        return self.o_proj(attn_output)",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_not_certain_means_not_written(bench: Callable[..., Any], name: str) -> None:
    b = bench()
    b.edit(*AMBIGUOUS[name])
    before = snapshot(b.tree)
    with pytest.raises(Refusal) as caught:
        b.analyze()
        b.apply()
    assert snapshot(b.tree) == before
    finding = caught.value.findings[0]
    assert finding.span.path.endswith("modeling_tiny_dense.py") and finding.span.line > 1 and finding.todo
