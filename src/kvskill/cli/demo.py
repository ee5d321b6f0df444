"""`kvskill demo`: convert an embedded example and verify it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from kvskill.demo import Demo, eras, run_demo
from kvskill.embedded import MODELS


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="tiny_dense", show_default=True)
@click.option("--era", type=click.Choice(eras()), default="2026-04", show_default=True, help="API of the target.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Work in this new folder and leave it there.",
)
@click.option("--full-diff", is_flag=True, help="Show the whole diff.")
def demo(model: str, era: str, keep: Path | None, full_diff: bool) -> int:
    """Analyze, apply and verify an embedded example in a temporary folder.

    Needs torch and transformers for the last step (pip install kvskill[verify,hf]). Exits 0 only if every step
    succeeded.
    """
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise click.UsageError(f"--keep {keep}: the folder is not empty")
        keep.mkdir(parents=True, exist_ok=True)
        return run_demo(Demo(keep.resolve(), model, era, full_diff))
    with tempfile.TemporaryDirectory(prefix="kvskill-demo-") as folder:
        return run_demo(Demo(Path(folder), model, era, full_diff))
