"""Copying the embedded target repository and its models to a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ERAS", "MODELS", "RUNNERS", "EmbeddedModel", "materialise", "materialise_runner"]

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class EmbeddedModel:
    """One Legacy model.

    `era` is the API it was written for, `classes` are (model, configuration), `verify` what `kvskill verify` needs
    beyond its defaults to reach every path.
    """

    name: str
    era: str
    classes: tuple[str, str]
    summary: str
    verify: tuple[str, ...] = ()


# Layers copied on top of each other, in order. A later layer replaces files of an earlier one.
ERAS: dict[str, tuple[str, ...]] = {
    # Padded 2-D batches and Legacy caches only: not a conversion target; 2-D models run here before it.
    "2026-03": ("common", "early", "era_2026_03"),
    # Packed tokens; block_size on ModelCacheInfo; the framework creates the communication groups.
    "2026-04": ("common", "early", "paged", "era_2026_04"),
    # block_size and manager_key on CacheEntry; models register their groups; lazy registry.
    "2026-06": ("common", "paged", "era_2026_06"),
    # Recurrent states, cache layouts, is_warm_up; a step returns a bool.
    "2026-08": ("common", "paged", "era_2026_06", "era_2026_08"),
}

MODELS: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            "tiny_dense",
            "2026-04",
            ("TinyDenseForCausalLM", "TinyDenseConfig"),
            "dense, grouped-query attention, plain PyTorch, packed input",
        ),
        EmbeddedModel(
            "tiny_moe2d",
            "2026-03",
            ("TinyMoe2dForCausalLM", "TinyMoe2dConfig"),
            "mixture of experts, grouped-query attention, FA v1 BSH, padded 2-D input",
        ),
        EmbeddedModel(
            "tiny_mixed",
            "2026-04",
            ("TinyMixedForCausalLM", "TinyMixedConfig"),
            "dense, sliding-window and full layers, plain PyTorch, packed input",
            verify=("--long",),  # a prompt beyond the window
        ),
        EmbeddedModel(
            "tiny_latent",
            "2026-04",
            ("TinyLatentForCausalLM", "TinyLatentConfig"),
            "dense, multi-head latent attention, expanded K and V cached, packed input",
        ),
    )
}


# Standalone folders with a runner of their own, and the name of the folder.
RUNNERS = {"skeleton_gqa": "skel", "skeleton_mla": "latent"}


def materialise(dest: Path, era: str = "2026-04", models: Iterable[str] = ("tiny_dense",)) -> Path:
    """Write the target repository of an API era with the named models, and register the models.

    `dest` is created; existing files of the same name are overwritten. Raises ValueError for an unknown
    era or model.
    """
    if era not in ERAS:
        raise ValueError(f"unknown era {era!r}; there are {', '.join(ERAS)}")
    names = list(models)
    for name in names:
        if name not in MODELS:
            raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    dest.mkdir(parents=True, exist_ok=True)
    for layer in ERAS[era]:
        _copy(_HERE / "target" / layer, dest)
    for name in names:
        _copy(_HERE / "models" / name, dest / "models" / name)
    _register(dest, [MODELS[name] for name in names])
    return dest


def materialise_runner(dest: Path, name: str) -> tuple[Path, Path]:
    """Write a standalone model folder to `dest`/models; gives it and its config. Raises KeyError for an unknown one."""
    source = _HERE / "runners" / name
    folder = dest / "models" / RUNNERS[name]
    _copy(source / RUNNERS[name], folder)
    shutil.copy(source / "config.json", dest / "config.json")
    return folder, dest / "config.json"


def _copy(source: Path, dest: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")  # an installed wheel is byte-compiled
    shutil.copytree(source, dest, dirs_exist_ok=True, ignore=ignore)


def _register(dest: Path, models: list[EmbeddedModel]) -> None:
    """Write the registry in the form the era uses: a dict of classes, or lazy (module, class) specs."""
    eager = dest / "executor/core/entrypoints/support_models.py"
    if eager.is_file():
        imports, entries = [], []
        for model in models:
            package = f"models.{model.name}.models"
            imports += [
                f"from {package}.modeling_{model.name} import {model.classes[0]}",
                f"from {package}.configuration_{model.name} import {model.classes[1]}",
            ]
            entries.append(f'    "{model.name}": ({", ".join(model.classes)}),')
        text = eager.read_text(encoding="utf-8").split("\nmodel_dict")[0]
        body = "\n".join([*imports, "", "model_dict = {", *entries, "}", ""])
        eager.write_text(f"{text}\n{body}", encoding="utf-8")
        return
    lazy = dest / "executor/core/support_models.py"
    head, marker, tail = lazy.read_text(encoding="utf-8").partition("}\n")
    specs = []
    for model in models:
        package = f"models.{model.name}.models"
        specs += [
            f'    "{model.name}": [',
            f'        ("{package}.modeling_{model.name}", "{model.classes[0]}"),',
            f'        ("{package}.configuration_{model.name}", "{model.classes[1]}"),',
            "    ],",
        ]
    lazy.write_text(head + "\n".join([*specs, ""]) + marker + tail, encoding="utf-8")
