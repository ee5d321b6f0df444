"""`kvskill analyze`: decide how a model's KV cache is converted, and say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model", required=False)
@click.option("--repo", type=_PATH, help="Root of the target repository (default: found by walking up).")
@click.option("--config", type=_PATH, help="config.json, or its folder (default: the YAML's model_path, ...).")
@click.option("--yaml", "yaml_name", help="YAML file that the memory plan follows.")
@click.option("--mode", type=click.Choice(["framework", "standalone"]), help="Deployment mode (部署模式).")
@click.option("--prompt", help='Text of a dispatch prompt that may name the mode: "部署模式: 独立部署".')
@click.option("--torch-npu", help="Release of torch_npu that runs the model: 2.8.0.post4, or >=2.8.0.")
@click.option("--what-if", help="Memory plan for other settings: batch=8,len=4096,new=512,tp=4,block=128.")
@click.option("--record", is_flag=True, help="Append the decisions to progress.md.")
@click.option("--no-write", is_flag=True, help="Do not write kv_manifest.yaml.")
@click.option("--config-only", type=_PATH, help="Understand one config.json, without a model folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the summary.")
def analyze(
    model: str | None,
    repo: Path | None,
    config: Path | None,
    yaml_name: str | None,
    mode: Literal["framework", "standalone"] | None,
    prompt: str | None,
    torch_npu: str | None,
    what_if: str | None,
    record: bool,
    no_write: bool,
    config_only: Path | None,
    as_json: bool,
) -> int:
    """Decide how MODEL's KV cache is converted: a model folder, or its name under models/ of the target.

    Reads config, modeling code, YAML files, progress.md and the target's source; runs none of it. Writes
    kv_manifest.yaml beside the model. Exits 0 when everything is decided (also when Legacy is kept, and when the model
    is Paged already), 3 when a blocking finding is left, 2 when the input cannot be read.
    """
    if config_only is not None:
        if model is not None:
            raise click.UsageError("--config-only takes no MODEL")
        from kvskill.analyzer.config.cli_report import config_only as understand_one

        return understand_one(config_only, as_json)
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    if record and no_write:
        raise click.UsageError("--record writes; it does not go with --no-write")
    from kvskill.analyzer.report import render, to_json
    from kvskill.analyzer.run import AnalyzeRequest
    from kvskill.analyzer.run import analyze as run

    result = run(
        AnalyzeRequest(
            model=model,
            repo=repo,
            config=config,
            yaml=yaml_name,
            mode=mode,
            prompt=prompt,
            torch_npu=torch_npu,
            what_if=what_if,
            record=record,
            write=not no_write,
        )
    )
    if as_json:
        click.echo(json.dumps(to_json(result), indent=2, ensure_ascii=False))
    else:
        click.echo(render(result), nl=False)
    return int(result.exit_code)
