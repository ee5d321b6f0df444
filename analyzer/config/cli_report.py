"""`kvskill analyze --config-only`: read, understand, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvskill.analyzer.config.load import read_config
from kvskill.analyzer.config.report import summary, to_json
from kvskill.analyzer.config.sidefiles import side_files
from kvskill.analyzer.config.understand import understand
from kvskill.diagnostics import ExitCode, KvskillError, Severity

__all__ = ["config_only"]


def config_only(path: Path, as_json: bool) -> int:
    """Print what a config.json says; the exit code.

    0: an answer (any verdict); 2: the file cannot be read; 3: no certain answer. With `as_json` the findings of 2
    and 3 are one JSON object on standard output too, and one line each on standard error.
    """
    shown = path.name or str(path)
    try:
        config = read_config(path, shown)
        side, notes = side_files(path.parent)
        facts = understand(config, shown=shown, side=side, notes=notes)
    except KvskillError as exc:
        if as_json:
            click.echo(json.dumps(_failure(exc), indent=2, ensure_ascii=False))
        for finding in exc.findings:
            click.echo(str(finding), err=True)
        return int(exc.exit_code)
    click.echo(json.dumps(to_json(facts), indent=2, ensure_ascii=False) if as_json else summary(facts))
    guess = any(f.code in ("KV130", "KV131") and f.severity is Severity.BLOCKING for f in facts.findings)
    return int(ExitCode.REFUSED if guess else ExitCode.DONE)


def _failure(exc: KvskillError) -> dict[str, Any]:
    """The JSON of exit 2 and 3. What is readable but not certain keeps Legacy; nothing is said about the rest."""
    out: dict[str, Any] = {"exit_code": int(exc.exit_code), "findings": [f.to_json() for f in exc.findings]}
    if exc.exit_code is ExitCode.REFUSED:
        out["paging_verdict"] = {
            "verdict": "legacy-keep",
            "scope": "none",
            "acceptable": ["legacy-keep"],
            "reason": " ".join(f.fact for f in exc.findings),
            "grounds": [f.code for f in exc.findings],
        }
    return out
