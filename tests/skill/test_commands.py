"""Every command in the skill's, the roles' and the rule pages' fences exists with those options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from kvskill.cli import cli

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?:bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvskill [^`]+)`")
PAGES = [*sorted((ROOT / "skills").rglob("*.md")), *sorted((ROOT / "references/rules").glob("*.md"))]
PAGES += [ROOT / "evals/README.md"]
FILLED = {"CODE": "KV012", "NAME": "x", "OPERATOR": "x", "V": "2.13.0", "N": "2", "RELEASE": "2.13.0"}


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `kvskill ...` line in a fence or in code spans."""
    out = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for body in FENCE.findall(text) for line in body.splitlines()]
        lines += INLINE.findall(text)
        out += [(page.stem, re.split(r"\s{2,}\(", line)[0]) for line in lines if line.startswith("kvskill ")]
    return sorted(set(out))


COMMANDS = commands()


def filled(word: str, folder: Path) -> str:
    """The placeholder's value: MODEL, DIR, PATH and FILE become things that exist."""
    if word in ("MODEL", "DIR", "FOLDER") or (word.startswith(("models/", "path/to/", "/no/such")) and "." not in word):
        return str(folder)
    if word in ("PATH", "FILE") or word.startswith("path/to/"):
        return str(folder / "config.json")
    return FILLED.get(word, word)


def parse(line: str, folder: Path) -> None:
    """Walk the click commands and parse; raises click.UsageError for what does not exist.

    A bare `kvskill analyze` in prose names the command and needs no arguments.
    """
    words = [filled(w, folder) for w in shlex.split(line, comments=True)[1:]]
    command: click.Command = cli
    context = click.Context(cli, info_name="kvskill")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None and name is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    if words in (["--help"], ["--version"], []):
        return
    try:
        command.make_context(command.name, words)
    except click.BadParameter as exc:
        if "does not exist" not in exc.message:  # an example path is no wrong command
            raise


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 25
    assert {"analyze", "apply", "undo", "verify", "explain", "ops", "template", "skill"} <= {
        line.split()[1] for _, line in COMMANDS
    }


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {c}" for p, c in COMMANDS])
def test_command_exists(page: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    parse(line, tmp_path)


@pytest.mark.parametrize(
    "line", ["kvskill verify MODEL --no-such", "kvskill chek MODEL", "kvskill skill remove", "kvskill ops show --json"]
)
def test_a_wrong_command_is_found(line: str, tmp_path: Path) -> None:
    with pytest.raises(click.UsageError):
        parse(line, tmp_path)
