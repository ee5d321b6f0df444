#!/usr/bin/env python3
"""Derive the operator schema table of the verifier from torch_npu wheels.

    derive_op_schemas.py --installed                 # print the schemas of the installed torch_npu
    derive_op_schemas.py WHEEL.whl ... --out TABLE   # add or replace these releases in TABLE

How: a wheel registers its operators from C strings in `lib/libtorch_npu.so`. Every NUL-terminated ASCII
string that holds `) -> ` is a candidate; it is kept when its operator name is one of `operators` (the list in
the table, or --operators FILE with one name a line). torch_npu is not imported. With torch at hand each kept
string is parsed as a schema, and one that does not parse is an error.

The table stores each distinct string once (`schemas`), each distinct set of them once (`sets`, lists of
indices), and names the set of every release (`releases`). Release, build date and the torch pin come from the
wheel's own metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "src/kvskill/verifier/data/op_schemas.json"
_LIB = "torch_npu/lib/libtorch_npu.so"
_STRING = re.compile(rb"[\x20-\x7e]{8,}(?=\x00)")
_HEAD = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)(?:\.[A-Za-z0-9_]+)?\(")


def schemas_in(binary: bytes, operators: frozenset[str]) -> list[str]:
    """The schema strings of `operators` found in a shared object, sorted, without duplicates."""
    found: set[str] = set()
    for match in _STRING.finditer(binary):
        text = match.group().decode("ascii")
        head = _HEAD.match(text)
        if ") -> " in text and head and head.group(1) in operators:
            found.add(text)
    return sorted(found)


def check_parses(schemas: Iterable[str]) -> None:
    """Parse each string with torch, where torch is installed; raises RuntimeError on a bad one."""
    # `import torch` would load an installed torch_npu, which fails where CANN is missing
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    except ImportError:
        print("torch is not installed: schemas were not parsed", file=sys.stderr)
        return
    for schema in schemas:
        torch._C.parse_schema("npu::" + schema)


def from_wheel(path: Path, operators: frozenset[str]) -> tuple[str, dict[str, str], list[str]]:
    """(release, facts, schemas) of a wheel file. Raises KeyError when it is not a torch_npu wheel."""
    with zipfile.ZipFile(path) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        fields = wheel.read(name).decode("utf-8", "replace").split("\n\n", 1)[0].splitlines()
        info = wheel.getinfo(_LIB)
        built = "{:04d}-{:02d}-{:02d}".format(*info.date_time[:3])
        schemas = schemas_in(wheel.read(info), operators)
    version = next(f.split(": ", 1)[1] for f in fields if f.startswith("Version: "))
    pins = [f.split(": ", 1)[1] for f in fields if f.startswith("Requires-Dist: torch")]
    return version, {"built": built, "requires": pins[0] if pins else ""}, schemas


def from_installed(operators: frozenset[str]) -> tuple[str, dict[str, str], list[str]]:
    """The same for the installed torch_npu. Raises PackageNotFoundError when there is none."""
    dist = metadata.distribution("torch_npu")
    lib = Path(str(dist.locate_file(_LIB)))
    pins = [r for r in dist.requires or [] if r.startswith("torch")]
    facts = {"built": "", "requires": pins[0] if pins else ""}
    return dist.version, facts, schemas_in(lib.read_bytes(), operators)


def merge(table: dict[str, Any], release: str, facts: dict[str, str], schemas: list[str]) -> None:
    """Put one release into the table; strings and sets that are there already are shared."""
    strings: list[str] = table["schemas"]
    known = {s: i for i, s in enumerate(strings)}
    for schema in schemas:
        if schema not in known:
            known[schema] = len(strings)
            strings.append(schema)
    wanted = sorted(known[s] for s in schemas)
    sets: list[list[int]] = table["sets"]
    if wanted not in sets:
        sets.append(wanted)
    table["releases"][release] = {"set": sets.index(wanted), **{k: v for k, v in facts.items() if v}}


def canonical(table: dict[str, Any]) -> dict[str, Any]:
    """The same table in an order that does not depend on the order of the merges; unused strings dropped."""
    order = sorted(table["releases"], key=release_key)
    used = sorted({i for r in order for i in table["sets"][table["releases"][r]["set"]]},
                  key=lambda i: table["schemas"][i])
    renumber = {old: new for new, old in enumerate(used)}
    sets: list[list[int]] = []
    releases: dict[str, Any] = {}
    for name in order:
        entry = dict(table["releases"][name])
        indices = sorted(renumber[i] for i in table["sets"][entry["set"]])
        if indices not in sets:
            sets.append(indices)
        releases[name] = {**entry, "set": sets.index(indices)}
    return {**table, "schemas": [table["schemas"][i] for i in used], "sets": sets, "releases": releases}


def release_key(release: str) -> tuple[int, ...]:
    """Sort key: 2.8.0.post5 after 2.8.0 and before 2.8.0.post17."""
    return tuple(int(p) for p in re.findall(r"\d+", release))


def write(table: dict[str, Any], path: Path) -> None:
    """One string or set a line, so that a diff of the file can be read."""
    table = canonical(table)
    parts = []
    for key, value in table.items():
        if key in ("schemas", "sets", "operators"):
            body = ",\n".join("  " + json.dumps(v, separators=(",", ":")) for v in value)
            parts.append(f"{json.dumps(key)}: [\n{body}\n]")
        elif isinstance(value, dict):
            body = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f"{json.dumps(key)}: {{\n{body}\n}}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--installed", action="store_true", help="read the installed torch_npu")
    parser.add_argument("--out", type=Path, help="table to update; without it the schemas are printed")
    parser.add_argument("--operators", type=Path, help="file with operator names, one a line")
    args = parser.parse_args(argv)
    base = args.out if args.out and args.out.exists() else TABLE
    table = json.loads(base.read_text(encoding="utf-8"))
    if args.operators:
        table["operators"] = sorted({w for w in args.operators.read_text().split() if w})
    operators = frozenset(table["operators"])
    found = [from_wheel(w, operators) for w in args.wheels]
    if args.installed:
        found.append(from_installed(operators))
    for release, facts, schemas in found:
        check_parses(schemas)
        if args.out:
            merge(table, release, {**table["releases"].get(release, {}), **facts}, schemas)
        else:
            print(f"# torch_npu {release}", *schemas, sep="\n")
    if args.out:
        write(table, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
