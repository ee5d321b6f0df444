"""Read a config.json strictly: what transformers could not load either is an error with a place."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvskill.analyzer.config.problems import invalid, refused
from kvskill.analyzer.config.rules import rules

__all__ = ["read_config", "read_json"]

_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
}


class _Bad(Exception):  # noqa: N818 (a signal between the JSON hooks and read_json)
    def __init__(self, code: str, fact: str, todo: str) -> None:
        super().__init__(fact)
        self.code, self.fact, self.todo = code, fact, todo


def read_config(path: Path, shown: str | None = None) -> Mapping[str, Any]:
    """The object in `path`.

    Raises InputError (KV040-KV050, exit 2) for what cannot be read, and Refusal (KV041, exit 3) for a link that
    leaves its folder.
    """
    shown = shown or path.name
    data = read_json(path, shown)
    if not isinstance(data, dict):
        kind = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(type(data), "a number")
        raise invalid("KV045", shown, f"The file holds {kind}, not an object.", "Give a model's config.json.")
    return data


def read_json(path: Path, shown: str) -> Any:
    """Any JSON value, with the same checks as `read_config`."""
    raw = _read_bytes(path, shown)
    for mark, name in _BOMS.items():
        if raw.startswith(mark):
            raise invalid("KV043", shown, f"The file is {name}.", "Save it as UTF-8 without a byte order mark.")
    if b"\x00" in raw[:4096]:
        raise invalid("KV043", shown, "The file holds zero bytes, so it is not UTF-8 text.", "Save it as UTF-8.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        fact = f"The file is not UTF-8 (byte {exc.start} is not valid)."
        raise invalid("KV043", shown, fact, "Save it as UTF-8.") from None
    try:
        data = json.loads(text, object_pairs_hook=_pairs, parse_constant=_Constant, parse_float=_number)
        _check(data)
    except _Bad as exc:
        raise invalid(exc.code, shown, exc.fact, exc.todo) from None
    except json.JSONDecodeError as exc:
        cut = exc.pos >= len(text.rstrip()) - 1 or exc.msg.startswith("Unterminated")
        end = " The file may be cut off." if cut else ""
        raise invalid(
            "KV044", shown, f"The file is not JSON ({exc.msg}).{end}", "Repair the file.", exc.lineno, exc.colno
        ) from None
    except RecursionError:
        raise invalid("KV047", shown, "The file is nested too deeply.", "Give a model's config.json.") from None
    except ValueError as exc:  # a number of thousands of digits
        fact = "A number has too many digits." if "limit" in str(exc) else f"A number cannot be read ({exc})."
        raise invalid("KV050", shown, fact, "Repair the file.") from None
    return data


def _read_bytes(path: Path, shown: str) -> bytes:
    limit = rules()["limits"]["max_bytes"]
    try:
        if path.is_symlink():
            _check_link(path, shown)
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise invalid("KV040", shown, "The path is a folder, not a file.", "Give the config.json inside it.")
        if not stat.S_ISREG(info.st_mode):
            raise invalid("KV040", shown, "The path is not a regular file.", "Give a model's config.json.")
        if info.st_size > limit:
            fact = f"The file has {info.st_size} bytes; a config.json has at most {limit}."
            raise invalid("KV042", shown, fact, "Give the model's config.json, not its weights or tokenizer.")
        with path.open("rb") as handle:
            return handle.read(limit + 1)
    except FileNotFoundError:
        raise invalid("KV040", shown, "The file does not exist.", "Check the path.") from None
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        fact = f"The file cannot be read ({reason})."
        raise invalid("KV040", shown, fact, "Check the path and its permissions.") from None


def _check_link(path: Path, shown: str) -> None:
    """A link may point inside its own folder only: what is analyzed must be what was given."""
    folder = path.parent.resolve()
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(folder):
        raise refused(
            "KV041",
            shown,
            "The file is a symbolic link to a place outside its folder.",
            "Give the file it points to, or a copy of it.",
        )


class _Constant(float):
    """NaN or an infinity, kept recognisable until the key that holds it is known."""


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _Constant(value)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    allowed = rules()["may_be_infinite"]
    for key, value in pairs:
        if key in out and out[key] != value:
            fact = f"The key {key!r} appears twice with different values."
            raise _Bad("KV048", fact, "Keep one of them.")
        if key not in allowed:
            _refuse_constant(key, value)
        out[key] = value
    return out


def _refuse_constant(key: str, value: Any) -> None:
    """Non-finite numbers, also in lists of lists (objects inside have been checked as they closed)."""
    level = [value]
    while level:
        if any(isinstance(x, _Constant) for x in level):
            _bad_number(key)
        level = [x for node in level if isinstance(node, list) for x in node]


def _bad_number(key: str) -> NoReturn:
    raise _Bad("KV046", f"The value of {key} is not a finite number.", "Give a finite number.")


def _check(data: Any) -> None:
    """Depth, and non-finite numbers outside objects."""
    limit = rules()["limits"]["max_depth"]
    _refuse_constant("the file", data)
    level, depth = [data] if isinstance(data, (dict, list)) else [], 0
    while level:
        depth += 1
        if depth > limit:
            raise _Bad("KV047", f"The file is nested more than {limit} levels deep.", "Give a model's config.json.")
        level = [
            x
            for node in level
            for x in (node.values() if isinstance(node, dict) else node)
            if isinstance(x, (dict, list))
        ]
