"""`kvskill skill`: installs the agent skill for a client, shows its state, checks its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvskill.cli._bounded import json_option
from kvskill.diagnostics import ExitCode
from kvskill.skillpack import clients as _clients
from kvskill.skillpack import install as _install
from kvskill.skillpack.pack import SKILL_NAME

_Maker = Callable[[Path, _clients.Client, bool], _install.Plan]
_NAMES = _clients.client_names()
_client = click.option("--client", type=click.Choice(_NAMES), required=True, help="The agent client.")
_scope = click.option(
    "--scope",
    type=click.Choice(["project", "user"]),
    default="project",
    show_default=True,
    help="Below --dir, or below the home directory.",
)
_dir = click.option(
    "--dir",
    "project",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default=True,
    help="Project folder.",
)
_dry = click.option("--dry-run", is_flag=True, help="Show what would be done.")
_force = click.option("--force", is_flag=True, help="Replace edited or foreign files (a backup is kept).")


@click.group()
def skill() -> None:
    """Install the agent skill for a client."""


def _report(plan: _install.Plan, verb: str, dry_run: bool, as_json: bool) -> None:
    if as_json:
        data = {
            "base": str(plan.base),
            "skill": plan.skill,
            "changed": plan.changes,
            "dry_run": dry_run,
            "actions": [{"action": a, "path": p} for a, p in plan.actions],
            "notes": list(plan.notes),
        }
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    for action, path in plan.actions:
        click.echo(f"{'would ' if dry_run else ''}{action} {path}")
    for note in plan.notes:
        click.echo(note)
    if not plan.changes:
        click.echo(f"nothing to do in {plan.base / plan.skill}")
    elif not dry_run:
        click.echo(f"{verb} {plan.base / plan.skill}")


def _changing(command: Callable[..., None]) -> click.Command:
    """A command with the options of those that write."""
    for option in (json_option, _force, _dry, _dir, _scope, _client):
        command = option(command)
    return skill.command()(command)


def _carry_out(make: _Maker, verb: str, **given: Any) -> None:
    """Plan, write unless --dry-run, report."""
    base = _clients.base_folder(given["scope"], given["project"])
    plan = make(base, _clients.load_client(given["client"], given["scope"]), given["force"])
    if not given["dry_run"]:
        _install.apply_plan(plan)
    _report(plan, verb, given["dry_run"], given["as_json"])


@_changing
def install(**given: Any) -> None:
    """Copy the skill, and its roles where the client knows them, into the client's folder."""
    _carry_out(_install.plan_install, "installed in", **given)


@_changing
def uninstall(**given: Any) -> None:
    """Remove what `install` wrote; folders it made go too when they are empty."""
    _carry_out(_install.plan_uninstall, "removed from", **given)


@skill.command()
@click.option("--client", type=click.Choice(_NAMES), help="One client; all of them when not given.")
@_scope
@_dir
@json_option
def status(client: str | None, scope: _clients.Scope, project: Path, as_json: bool) -> int:
    """Say for each client whether the skill is absent, current, outdated, edited, or a foreign one.

    Exit 0 when current (without --client: when nothing is outdated, edited or foreign), else 1.
    """
    base = _clients.base_folder(scope, project)
    rows = []
    for name in [client] if client else _NAMES:
        found = _clients.load_client(name, scope)
        state, paths = _install.status(base, found)
        folder = f"{found.skills}/{SKILL_NAME}"
        rows.append({"client": name, "state": state, "folder": folder, "differs": paths})
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        for row in rows:
            click.echo(f"{row['client']:<9} {row['state']:<9} {row['folder']}")
            for path in row["differs"]:
                click.echo(f"          differs: {path}")
    good = {"current"} if client else {"current", "absent"}
    return int(ExitCode.DONE if all(r["state"] in good for r in rows) else ExitCode.FOUND)


@skill.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def validate(folder: Path | None, as_json: bool) -> int:
    """Check a skill folder (default: the packaged one) against the Agent Skills format and its budgets."""
    from kvskill.skillpack.pack import skill_folder
    from kvskill.skillpack.validate import validate_skill

    target = folder or skill_folder()
    findings = validate_skill(target)
    if as_json:
        click.echo(json.dumps([f.to_json() for f in findings], indent=1, ensure_ascii=False))
    elif findings:
        for finding in findings:
            click.echo(str(finding))
    else:
        click.echo(f"valid: {target}")
    return int(ExitCode.FOUND if findings else ExitCode.DONE)
