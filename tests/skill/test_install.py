"""Install and uninstall of the skill: idempotent, nothing of the user's is lost, the tree is as before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvskill
from kvskill.cli import main
from kvskill.skillpack import client_names, load_client, skill_folder

CLIENTS = client_names()
SKILL = "model-infer-kvcache"


def run(*args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) through the real entry point, exit codes included."""
    import click

    @click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    @click.pass_context
    def entry(ctx: click.Context) -> None:
        main(ctx.args)

    result: Result = CliRunner().invoke(entry, list(args))
    return result.exit_code, result.stdout, result.stderr


def snapshot(root: Path) -> dict[str, tuple[str, bytes, int]]:
    """Kind, content and mode of everything below `root`."""
    out = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            out[name] = ("link", str(path.readlink()).encode(), 0)
        elif path.is_dir():
            out[name] = ("dir", b"", 0)
        else:
            out[name] = ("file", path.read_bytes(), path.stat().st_mode & 0o777)
    return out


def used_project(root: Path) -> None:
    """A project that has things of its own in every client's folder."""
    skills = (
        ".claude/skills/other",
        ".agents/skills/other",
        ".opencode/skills/other",
        ".config/opencode/skills",
    )
    for folder in skills:
        (root / folder).mkdir(parents=True)
        (root / folder / "SKILL.md").write_text("---\nname: other\ndescription: x\n---\n")
    (root / ".claude/agents").mkdir()
    (root / ".claude/agents/mine.md").write_text("mine")
    (root / "models/x").mkdir(parents=True)
    (root / "models/x/a.py").write_text("a = 1\n")


@pytest.mark.parametrize("scope", ["project", "user"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_install_twice_uninstall_leaves_the_tree(
    client: str, used: bool, scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if used:
        used_project(root)
    where = ["--client", client, "--scope", scope]
    if scope == "user":
        monkeypatch.setenv("HOME", str(root))
    else:
        where += ["--dir", str(root)]
    before = snapshot(root)
    assert run("skill", "status", *where)[0] == 1

    code, out, _ = run("skill", "install", *where, "--dry-run")
    assert code == 0 and "would write" in out
    assert snapshot(root) == before

    assert run("skill", "install", *where)[0] == 0
    installed = snapshot(root)
    target = root / load_client(client, "user" if scope == "user" else "project").skills / SKILL
    assert (target / "SKILL.md").read_bytes() == (skill_folder() / "SKILL.md").read_bytes()
    assert {p.name for p in (target / "references").iterdir()} == {
        p.name for p in (skill_folder() / "references").iterdir()
    }
    assert {k: v for k, v in installed.items() if k in before} == before
    assert run("skill", "status", *where)[0] == 0
    assert run("skill", "validate", str(target))[0] == 0

    code, out, _ = run("skill", "install", *where)
    assert code == 0 and "nothing to do" in out
    assert snapshot(root) == installed

    assert run("skill", "uninstall", *where)[0] == 0
    assert snapshot(root) == before
    code, out, _ = run("skill", "uninstall", *where)
    assert code == 0 and "not installed" in out
    assert snapshot(root) == before


def test_roles_are_written_in_the_form_of_the_client(tmp_path: Path) -> None:
    for client in ("claude", "opencode"):
        assert run("skill", "install", "--client", client, "--dir", str(tmp_path))[0] == 0
    claude = (tmp_path / ".claude/agents/kvcache-analyzer.md").read_text()
    opencode = (tmp_path / ".opencode/agents/kvcache-analyzer.md").read_text()
    assert claude.startswith("---\nname: kvcache-analyzer\n") and "mode:" not in claude.split("---")[1]
    assert "mode: subagent" in opencode.split("---")[1] and "name:" not in opencode.split("---")[1]
    assert claude.split("---\n", 2)[2] == opencode.split("---\n", 2)[2]


def test_two_clients_share_one_folder(tmp_path: Path) -> None:
    for client in ("agents", "codex"):
        assert run("skill", "install", "--client", client, "--dir", str(tmp_path))[0] == 0
    code, out, _ = run("skill", "uninstall", "--client", "agents", "--dir", str(tmp_path))
    assert code == 0 and "kept for codex" in out
    assert run("skill", "status", "--client", "codex", "--dir", str(tmp_path))[0] == 0
    assert run("skill", "status", "--client", "agents", "--dir", str(tmp_path))[0] == 1
    assert run("skill", "uninstall", "--client", "codex", "--dir", str(tmp_path))[0] == 0
    assert snapshot(tmp_path) == {}


def test_edited_file_is_kept_without_force(tmp_path: Path) -> None:
    where = ["--client", "claude", "--dir", str(tmp_path)]
    run("skill", "install", *where)
    file = tmp_path / f".claude/skills/{SKILL}/SKILL.md"
    edited = file.read_text() + "\nmine\n"
    file.write_text(edited)
    before = snapshot(tmp_path)
    for command in ("install", "uninstall"):
        code, _, err = run("skill", command, *where)
        assert code == 3 and "KV091" in err and "SKILL.md" in err
        assert snapshot(tmp_path) == before
    code, out, _ = run("skill", "status", *where)
    assert code == 1 and "edited" in out

    assert run("skill", "install", *where, "--force")[0] == 0
    assert file.read_bytes() == (skill_folder() / "SKILL.md").read_bytes()
    code, out, _ = run("skill", "uninstall", *where)
    assert code == 0 and "backup" in out
    backup = tmp_path / f".claude/skills/{SKILL}/.kvskill-backup-1.zip"
    import zipfile

    assert zipfile.ZipFile(backup).read(f".claude/skills/{SKILL}/SKILL.md").decode() == edited
    # what is left is the user's: a new install and uninstall keep it
    left = snapshot(tmp_path)
    assert run("skill", "install", *where)[0] == 0
    assert run("skill", "uninstall", *where)[0] == 0
    assert snapshot(tmp_path) == left


def test_foreign_skill_of_the_same_name_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / f".agents/skills/{SKILL}"
    (folder / "references").mkdir(parents=True)
    (folder / "SKILL.md").write_text("prose skill")
    (folder / "references/old.md").write_text("old")
    script = folder / "run.sh"
    script.write_text("true\n")
    script.chmod(0o755)
    before = snapshot(tmp_path)
    where = ["--client", "agents", "--dir", str(tmp_path)]
    assert run("skill", "status", "--client", "agents", "--dir", str(tmp_path))[0] == 1
    code, _, err = run("skill", "install", *where)
    assert code == 3 and err.count("KV091") == 3 and snapshot(tmp_path) == before
    assert run("skill", "install", *where, "--force")[0] == 0
    assert not (folder / "references/old.md").exists()  # no mixture of two skills
    assert run("skill", "status", *where)[0] == 0
    assert run("skill", "install", *where)[0] == 0
    assert run("skill", "uninstall", *where)[0] == 0
    assert snapshot(tmp_path) == before


def test_foreign_role_file_comes_back(tmp_path: Path) -> None:
    role = tmp_path / ".claude/agents/kvcache-reviewer.md"
    role.parent.mkdir(parents=True)
    role.write_text("mine")
    before = snapshot(tmp_path)
    where = ["--client", "claude", "--dir", str(tmp_path)]
    assert run("skill", "install", *where)[0] == 3
    assert run("skill", "install", *where, "--force")[0] == 0
    assert role.read_text() != "mine"
    assert run("skill", "uninstall", *where)[0] == 0
    assert snapshot(tmp_path) == before


def test_upgrade_replaces_and_removes_what_is_unedited(tmp_path: Path) -> None:
    where = ["--client", "agents", "--dir", str(tmp_path)]
    run("skill", "install", *where)
    folder = tmp_path / f".agents/skills/{SKILL}"
    lock = folder / ".kvskill-lock.json"
    data = json.loads(lock.read_text())
    # as an older version would have left it: one file with other content, one that no longer ships
    from kvskill.skillpack.lock import digest

    for name, text in (("SKILL.md", "older"), ("references/dropped.md", "dropped")):
        (folder / name).write_text(text)
        data["files"][f".agents/skills/{SKILL}/{name}"] = digest(text.encode())
    data["version"] = "0.0.1"
    lock.write_text(json.dumps(data))
    code, out, _ = run("skill", "status", *where)
    assert code == 1 and "outdated" in out
    assert run("skill", "install", *where)[0] == 0
    assert not (folder / "references/dropped.md").exists()
    assert run("skill", "status", *where)[0] == 0
    assert run("skill", "uninstall", *where)[0] == 0
    assert snapshot(tmp_path) == {}


def test_file_of_the_user_in_the_folder_stays(tmp_path: Path) -> None:
    where = ["--client", "agents", "--dir", str(tmp_path)]
    run("skill", "install", *where)
    mine = tmp_path / f".agents/skills/{SKILL}/notes.md"
    mine.write_text("mine")
    assert run("skill", "install", *where)[0] == 0
    assert run("skill", "uninstall", *where)[0] == 0
    assert mine.read_text() == "mine" and [p.name for p in mine.parent.iterdir()] == ["notes.md"]


@pytest.mark.parametrize("link", [".claude", ".claude/skills", f".claude/skills/{SKILL}", ".claude/agents"])
def test_symbolic_link_is_a_clear_error(link: str, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = root / link
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    before = snapshot(tmp_path)
    code, _, err = run("skill", "install", "--client", "claude", "--dir", str(root))
    assert code == 2 and "KV092" in err and "symbolic link" in err and str(elsewhere) in err
    assert snapshot(tmp_path) == before


def test_installed_file_replaced_by_a_link_is_not_written_through(tmp_path: Path) -> None:
    where = ["--client", "agents", "--dir", str(tmp_path / "root")]
    (tmp_path / "root").mkdir()
    run("skill", "install", *where)
    outside = tmp_path / "outside.md"
    outside.write_text("outside")
    file = tmp_path / f"root/.agents/skills/{SKILL}/SKILL.md"
    file.unlink()
    file.symlink_to(outside)
    for command in ("install", "uninstall"):
        code, _, err = run("skill", command, *where, "--force")
        assert code == 2 and "KV092" in err
    assert outside.read_text() == "outside"


def test_file_in_place_of_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / ".claude").write_text("a file")
    before = snapshot(tmp_path)
    code, _, err = run("skill", "install", "--client", "claude", "--dir", str(tmp_path))
    assert code == 2 and "KV090" in err and "Traceback" not in err
    assert snapshot(tmp_path) == before


def test_read_only_folder_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write fails half way (injected, for root writes everywhere): nothing remains."""
    real = Path.write_bytes
    calls = 0

    def fail_at_the_third(self: Path, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", fail_at_the_third)
    code, _, err = run("skill", "install", "--client", "claude", "--dir", str(tmp_path))
    assert code == 2 and "KV090" in err and "Permission denied" in err
    assert snapshot(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_really_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        code, _, err = run("skill", "install", "--client", "claude", "--dir", str(tmp_path))
    finally:
        tmp_path.chmod(0o755)
    assert code == 2 and "KV090" in err and snapshot(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": 9}', '{"schema": 1, "files": {"../x": "0"}}'])
def test_broken_lock_is_a_clear_error(text: str, tmp_path: Path) -> None:
    run("skill", "install", "--client", "agents", "--dir", str(tmp_path))
    (tmp_path / f".agents/skills/{SKILL}/.kvskill-lock.json").write_text(text)
    for command in ("install", "uninstall", "status"):
        code, _, err = run("skill", command, "--client", "agents", "--dir", str(tmp_path))
        assert code == 2 and "KV094" in err


def test_missing_base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("skill", "install", "--client", "claude", "--dir", str(tmp_path / "none"))
    assert code == 2 and "KV090" in err
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    code, _, err = run("skill", "install", "--client", "claude", "--scope", "user")
    assert code == 2 and "HOME" in err


def test_json_and_unknown_client(tmp_path: Path) -> None:
    code, out, _ = run("skill", "install", "--client", "codex", "--dir", str(tmp_path), "--json")
    assert code == 0 and json.loads(out)["changed"] is True
    code, out, _ = run("skill", "status", "--dir", str(tmp_path), "--json")
    assert code == 0 and {r["client"]: r["state"] for r in json.loads(out)} == {
        "claude": "absent",
        "codex": "current",
        "opencode": "absent",
        "agents": "absent",
    }
    code, _, err = run("skill", "install", "--client", "vim", "--dir", str(tmp_path))
    assert code == 2 and "claude" in err


def test_lock_holds_version_and_hashes(tmp_path: Path) -> None:
    run("skill", "install", "--client", "codex", "--dir", str(tmp_path))
    data = json.loads((tmp_path / f".agents/skills/{SKILL}/.kvskill-lock.json").read_text())
    assert data["version"] == kvskill.__version__ and data["clients"] == ["codex"]
    assert all(len(v) == 64 for v in data["files"].values())
