"""Output helpers shared by the commands that print reference facts: bounded text, JSON, near names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

__all__ = ["emit", "json_option", "lines_option", "unknown_name"]

_F = TypeVar("_F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output, complete.")


def lines_option(default: int) -> Callable[[_F], _F]:
    """`--lines N`: the most lines to print, 0 for all."""
    return click.option(
        "--lines",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help="Most lines to print; 0 for all.",
    )


def emit(text: str | Iterable[str], limit: int) -> None:
    """Print at most `limit` lines and say how many are left out (0: all)."""
    lines = text.rstrip("\n").split("\n") if isinstance(text, str) else list(text)
    shown = lines if limit == 0 or len(lines) <= limit else lines[:limit]
    for line in shown:
        click.echo(line)
    if len(shown) < len(lines):
        click.echo(f"... {len(lines) - len(shown)} more lines (--lines 0 for all, --json for data)")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> click.ClickException:
    """A usage error (exit 2) that offers the nearest names."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    near += [n for n in names if name.lower() in n.lower() and n not in near][: 4 - len(near)]
    hint = f" Did you mean: {', '.join(near)}?" if near else ""
    return click.UsageError(f"There is no {kind} named {name!r}.{hint}")
