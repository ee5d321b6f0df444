"""`kvskill schema`: the JSON schema of the manifest."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON schema of kv_manifest.yaml."""
    from kvskill.manifest import Manifest

    click.echo(json.dumps(Manifest.model_json_schema(), indent=2, ensure_ascii=False))
