"""Arithmetic and file helpers."""

import yaml


def ceil_div(value: int, unit: int) -> int:
    """How many `unit`s hold `value`."""
    return -(-value // unit)


def align_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return ceil_div(value, unit) * unit


def read_yaml(path):
    """One YAML file as a dict."""
    with open(path, encoding="utf-8") as handle:
        return yaml.safe_load(handle)
