"""`kvskill verify`: old and new code side by side on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span


def _lengths(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("give lengths in tokens, such as 5,1,3,17") from None
    if not lengths or min(lengths) < 1:
        raise click.BadParameter("every prompt needs at least one token")
    return lengths


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--repo", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Target repository.")
@click.option(
    "--before-repo",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Tree of the Legacy model.",
)
@click.option("--config", type=click.Path(path_type=Path, exists=True), help="The model's config.json.")
@click.option("--against", type=click.Choice(["legacy", "hf", "both"]), default="both", show_default=True)
@click.option("--backend", type=click.Choice(["auto", "npu", "wheel", "table"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--python", help="Interpreter of the target's child processes.")
@click.option("--prompts", callback=_lengths, help="Prompt lengths, such as 5,1,3,17.")
@click.option("--decode-steps", type=click.IntRange(1, 4096), default=24, show_default=True)
@click.option("--block-size", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--batch-size", type=click.IntRange(1, 64), default=3, show_default=True, help="Request slots.")
@click.option("--long", "long_", is_flag=True, help="Add a prompt that crosses three windows and several blocks.")
@click.option("--seed", type=int, default=20260428, show_default=True)
@click.option("--tp", type=click.IntRange(1, 8), default=1, show_default=True, help="Ranks, on gloo.")
@click.option("--mtp", type=click.IntRange(0, 8), default=0, show_default=True, help="Draft tokens per step.")
@click.option("--tolerance", type=float, help="Bound on max |a - b| / max |ref| (default: by dtype).")
@click.option("--waive", multiple=True, metavar="RULE", help="Do not check this operator rule; the report says so.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds per child process.")
@click.option("--memory-mb", type=int, default=12000, show_default=True, help="Private memory per child process.")
@click.option("--fast", is_flag=True, help="Only the recorded run, without its repetitions.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep job files, logs and arrays in this folder.")
@click.option("--templates", is_flag=True, help="Verify the code templates and write the evidence ledger.")
@click.option("--check", "check_ledger", is_flag=True, help="With --templates: only compare the ledger's hashes.")
@click.option("--slice", "slice_text", metavar="TEXT", help="With --templates: repeat the slice chosen by TEXT.")
@click.option("--ledger", type=click.Path(path_type=Path), help="With --templates: the ledger file.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(model: Path | None, **given: Any) -> int:
    """Run a model's Legacy and Paged code with the same weights on a CPU, and compare them.

    MODEL is a model folder, or its name under models/ of the repository. Exit codes: 0 agree, 1 differ or a link
    fails, 2 cannot run, 3 the manifest keeps Legacy.
    """
    from rich.console import Console

    from kvskill.verifier.options import Limits, VerifyOptions
    from kvskill.verifier.report import render
    from kvskill.verifier.run import verify_model

    if given["templates"]:
        return _templates(given)
    if model is None:
        raise InputError(Diagnostic("KV430", Severity.ERROR, "No model was given.", "Name a folder.", Span(".")))
    options = VerifyOptions(
        model=model,
        repo=given["repo"],
        before_repo=given["before_repo"],
        config=given["config"],
        against=given["against"],
        backend=given["backend"],
        dtype=given["dtype"],
        python=given["python"],
        prompts=given["prompts"],
        decode_steps=given["decode_steps"],
        block_size=given["block_size"],
        batch_size=given["batch_size"],
        long=given["long_"],
        seed=given["seed"],
        tp=given["tp"],
        mtp=given["mtp"],
        tolerance=given["tolerance"],
        waive=given["waive"],
        checks=not given["fast"],
        limits=Limits(given["timeout"], given["memory_mb"]),
        keep=given["keep"],
    )
    report = verify_model(options)
    if given["as_json"]:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        render(report, Console(width=140, highlight=False))
    return int(report.exit_code)


def _templates(given: dict[str, Any]) -> int:
    """`verify --templates`: progress on a terminal, findings as lines."""
    from rich.console import Console
    from rich.progress import Progress

    from kvskill.verifier.templates import TemplateOptions, verify_templates

    options = TemplateOptions(
        ledger=given["ledger"],
        check=given["check_ledger"],
        slice_text=given["slice_text"],
        backend=given["backend"],
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal or given["as_json"]) as bar:
        task = bar.add_task("template cases", total=None)
        report = verify_templates(options, lambda done, total: bar.update(task, completed=done, total=total))
    if given["as_json"]:
        click.echo(
            json.dumps({"figures": report.figures, "findings": [f.to_json() for f in report.findings]}, indent=1)
        )
        return int(report.exit_code)
    for finding in report.findings:
        click.echo(str(finding))
    worst = max(report.figures.values(), default=0.0)
    if report.figures:
        backend = f"{report.backend.get('kind')}, torch_npu {report.backend.get('torch_npu')}"
        click.echo(f"{len(report.figures)} cases, worst {worst:.1e}, {report.seconds:.0f} s, operators: {backend}")
    elif not report.findings:
        click.echo("the ledger vouches for the templates as they are")
    if report.written:
        click.echo(f"wrote {report.ledger.name}")
    return int(report.exit_code)
