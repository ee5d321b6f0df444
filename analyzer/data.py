"""Access to the data files that ship with kvskill (`kvskill/data`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import kvskill

__all__ = ["data_path", "load_json", "load_yaml", "parse_yaml"]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def data_path(name: str) -> Path:
    """Path of a data file inside the installed package."""
    return Path(kvskill.__file__).parent / "data" / name


def parse_yaml(text: str) -> Any:
    """Parse one YAML document with the safe loader (the C one where PyYAML has it)."""
    return yaml.load(text, Loader=_LOADER)


@cache
def load_yaml(name: str) -> Any:
    """A YAML data file, parsed once."""
    return parse_yaml(data_path(name).read_text(encoding="utf-8"))


@cache
def load_json(name: str) -> Any:
    """A JSON data file, parsed once."""
    return json.loads(data_path(name).read_text(encoding="utf-8"))
