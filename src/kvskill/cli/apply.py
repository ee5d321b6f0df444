"""`kvskill apply` and `kvskill undo`: rewrite a model, and put it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvskill.implementer.apply import Applied

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option("--repo", type=_PATH, help="Root of the target repository (default: found by walking up).")
@click.option("--config", type=_PATH, help="config.json (default: the one the manifest was made with).")
@click.option("--diff", "show_diff", is_flag=True, help="Show what would change; write nothing, exit 0.")
@click.option("--check", "check_only", is_flag=True, help="Write nothing; exit 1 when something would change.")
@click.option("--force", is_flag=True, help="Write although git does not hold the files' present state.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def apply(
    model: str,
    repo: Path | None,
    config: Path | None,
    show_diff: bool,
    check_only: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Rewrite MODEL as its manifest says: all files or none.

    Exits 0 when converted, already Paged or kept Legacy, 1 with --check when something would change, 2 when the
    input cannot be used, 3 when it is not certain; then nothing was written.
    """
    from kvskill.implementer.apply import ApplyRequest
    from kvskill.implementer.apply import apply as run

    if show_diff and check_only:
        raise click.UsageError("--diff and --check exclude each other")
    mode = "diff" if show_diff else "check" if check_only else "write"
    done = run(ApplyRequest(model, repo, config, mode, force))  # type: ignore[arg-type]
    if as_json:
        click.echo(json.dumps(_json(done), indent=2, ensure_ascii=False))
    else:
        _print(done, show_diff)
    return int(done.exit_code)


def _json(done: Applied) -> dict[str, object]:
    return {
        "status": done.status,
        "exit_code": int(done.exit_code),
        "files": [{"path": c.path, "edits": c.edits, "added": _count(c.new) - _count(c.old)} for c in done.changes],
        "findings": [f.to_json() for f in done.findings],
    }


def _count(data: bytes) -> int:
    return len(data.splitlines())


def _print(done: Applied, show_diff: bool) -> None:
    if show_diff:
        from moreorless import unified_diff

        for change in done.changes:
            old, new = (t.decode("utf-8", errors="replace") for t in (change.old, change.new))
            click.echo(unified_diff(old, new, change.path), nl=False)
    for finding in done.findings:
        click.echo(str(finding), err=True)
    text = {
        "nothing-to-do": "nothing to do: the model is Paged already",
        "legacy-kept": "nothing to do: the manifest keeps the Legacy cache",
        "converted": f"converted {len(done.changes)} file(s); undo with `kvskill undo {done.place.name}`",
        "would-convert": f"would convert {len(done.changes)} file(s)",
    }[done.status]
    click.echo(text, err=show_diff)
    if done.status == "converted":
        for change in done.changes:
            click.echo(f"  {change.path}: {change.edits} edits")


@click.command()
@click.argument("model")
@click.option("--repo", type=_PATH, help="Root of the target repository (default: found by walking up).")
@click.option("--force", is_flag=True, help="Put the originals back although the files changed since.")
def undo(model: str, repo: Path | None, force: bool) -> int:
    """Put back what the last apply replaced in MODEL."""
    from kvskill.analyzer.resolve import find_model
    from kvskill.implementer.writer import undo as run

    place = find_model(model, repo)
    for rel in run(place.model_dir, force=force):
        click.echo(f"restored {place.folder}/{rel}")
    return 0
