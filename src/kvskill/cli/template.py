"""`kvskill template`: the code templates, their constraints, and the code for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvskill.cli._bounded import emit, json_option, lines_option, unknown_name
from kvskill.manifest import MANIFEST_NAME, Manifest, load_manifest


@click.group()
def template() -> None:
    """List and show the code templates."""


@template.command("list")
@lines_option(60)
@json_option
def list_(lines: int, as_json: bool) -> None:
    """List the templates with what they are for."""
    from kvskill.opsinfo.templates import list_templates

    found = list_templates()
    if as_json:
        click.echo(json.dumps([{"name": t.name, **t.header} for t in found.values()], indent=1, ensure_ascii=False))
        return
    emit([f"{t.name}: {t.summary}" for t in found.values()], lines)


def _manifest(model: str, repo: Path | None) -> Manifest:
    """The manifest beside a model: a folder, or a name below `models/` here, above, or in --repo."""
    places = [Path(model)]
    if repo is not None:
        places += [repo / model, repo / "models" / model]
    else:
        places += [folder / "models" / model for folder in (Path.cwd(), *Path.cwd().parents)]
    folder = next((p for p in places if p.is_dir()), places[0])
    return load_manifest(folder / MANIFEST_NAME, str(folder / MANIFEST_NAME))


@template.command()
@click.argument("name")
@click.option("--model", help="A model folder or name: values come from its kv_manifest.yaml.")
@click.option(
    "--repo", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Where models/ is looked up."
)
@click.option("--raw", is_flag=True, help="The template text itself.")
@lines_option(150)
@json_option
def show(name: str, model: str | None, repo: Path | None, raw: bool, lines: int, as_json: bool) -> None:
    """Show a template: what it needs and limits, and its code for a model (or for a common one)."""
    from kvskill.opsinfo.templates import (
        default_context,
        has_context,
        list_templates,
        model_contexts,
        render_template,
    )

    found = list_templates()
    manifest = _manifest(model, repo) if model is not None else None
    if name not in found:
        near = [n for n in found if n.split("/")[-1] == name]
        if manifest is not None:
            near = [n for n in near if n.startswith(f"{manifest.deployment.value}/")] or near
        if len(near) > 1:
            raise click.UsageError(f"{name} is ambiguous: {', '.join(near)}.")
        if not near:
            raise unknown_name("template", name, [*found, *(n.split("/")[-1] for n in found)])
        name = near[0]
    info = found[name]
    codes: list[dict[str, Any]] = []
    raw = raw or not has_context(name)  # a template without example values is shown as it is
    if not raw and model is None:
        title = "names of a common model; give --model for one of yours"
        codes.append({"title": title, "code": render_template(name, default_context(name))})
    elif not raw and manifest is not None:
        for title, context in model_contexts(name, manifest):
            codes.append({"title": title, "code": render_template(name, context)})
        if not codes:
            raise click.UsageError(f"No group of the model is served by {name}.")
    if as_json:
        data = {"name": name, "header": info.header, "codes": codes, "template": info.body if raw else None}
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    text = [f"{key}: {value}" for key, value in info.header.items()]
    for code in codes:
        text += ["", f"# {code['title']}", *code["code"].strip("\n").split("\n")]
    if model is not None:
        text += ["", "# Attribute and local names are those of a common model: use the names of your class."]
    if raw:
        text += ["", *info.body.rstrip("\n").split("\n")]
    emit(text, lines)
