"""`kvskill ops`: operator schemas by release, limits and evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from kvskill.cli._bounded import emit, json_option, lines_option, unknown_name

_SECTIONS = (
    "argument_map",
    "layouts",
    "sparse_modes",
    "sparse_by_path",
    "lengths",
    "cache_shapes",
    "block_size_rules",
    "head_dim_rules",
    "mla_rules",
)


@click.group()
def ops() -> None:
    """Operator schemas, limits and evidence by release. Nothing here was run on an NPU unless it says so."""


def _table() -> Any:
    from kvskill.verifier.backend.schemas import load_table

    return load_table()


def _release(table: Any, release: str | None) -> str | None:
    if release is not None and release not in table.releases:
        raise unknown_name("torch_npu release", release, table.releases)
    return release


def _bare(name: str) -> str:
    for prefix in ("torch.ops.npu.", "torch_npu.", "npu::"):
        name = name.removeprefix(prefix)
    return name.removesuffix(".default")


def _texts(table: Any, name: str) -> dict[str, list[str]]:
    """Distinct schema -> the releases that register it, for all overloads of an operator."""
    out: dict[str, list[str]] = {}
    for release in table.releases:
        for key, text in table.schemas(release).items():
            if key.split(".")[0] == name:
                out.setdefault(text, []).append(release)
    return out


@ops.command("list")
@click.option("--release", help="Only operators that this torch_npu release registers, e.g. 2.8.0.")
@click.option("--all", "everything", is_flag=True, help="Also operators without facts.")
@lines_option(80)
@json_option
def list_(release: str | None, everything: bool, lines: int, as_json: bool) -> None:
    """List the operators and the releases of the schema table."""
    from kvskill.opsinfo.facts import load_operators

    table = _table()
    facts = load_operators()
    names = list(facts) + ([n for n in table.operators if n not in facts] if everything else [])
    if _release(table, release):
        here = {k.split(".")[0] for k in table.schemas(release)}
        names = [n for n in names if n in here]
    if as_json:
        rows = [{"name": n, "summary": facts[n].summary if n in facts else None} for n in names]
        data = {"operators": rows, "releases": list(table.releases)}
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    text = [f"{n}: {facts[n].summary}" if n in facts else n for n in names]
    emit([*text, "", f"torch_npu releases: {', '.join(table.releases)}"], lines)


@ops.command()
@click.argument("operator")
@click.option("--release", help="A torch_npu release, e.g. 2.8.0.post5; all of them when not given.")
@click.option("--section", type=click.Choice(_SECTIONS), help="Only this table.")
@lines_option(120)
@json_option
def show(operator: str, release: str | None, section: str | None, lines: int, as_json: bool) -> None:
    """Schema by release, results, limits and facts of one operator."""
    from kvskill.opsinfo.facts import load_operators

    table, name = _table(), _bare(operator)
    facts = load_operators().get(name)
    _release(table, release)
    if facts is None and name not in table.operators:
        raise unknown_name("operator", operator, [*load_operators(), *table.operators])
    texts = _texts(table, name)
    if release:
        texts = {t: [release] for t, where in texts.items() if release in where}
    tables: Mapping[str, Any] = facts.tables if facts else {}
    if section:
        if section not in tables:
            raise click.UsageError(f"{name} has no table {section}.")
        tables = {section: tables[section]}
    data = {
        "name": name,
        "summary": facts.summary if facts else None,
        "returns": facts.returns if facts else None,
        "use": facts.use if facts else None,
        "schemas": [{"schema": t, "releases": where} for t, where in texts.items()],
        "facts": [
            {"id": f.id, "fact": f.fact, "evidence": list(f.evidence), "source": f.source}
            for f in (facts.facts if facts else ())
        ],
        "tables": tables,
        "npu": "not run",
    }
    if as_json:
        if section:
            data = {"name": name, "tables": tables, "npu": "not run"}
        click.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    emit(_table_lines(tables) if section else _show_lines(data, release), lines)


def _show_lines(data: dict[str, Any], release: str | None) -> list[str]:
    out = [data["name"]]
    if data["summary"]:
        out += [data["summary"], f"returns: {data['returns']}", f"use: {data['use']}"]
    out.append("")
    if not data["schemas"]:
        where = f"torch_npu {release}" if release else "any release of the table"
        out.append(f"not registered by {where}")
    for row in data["schemas"]:
        out += [f"torch_npu {', '.join(row['releases'])}", f"  {row['schema']}"]
    if data["facts"]:
        out += ["", "facts (letters: kvskill explain evidence; NPU: not run)"]
        out += [f"- {f['fact']} [{']['.join(f['evidence'])}]" for f in data["facts"]]
    if data["tables"]:
        names = [k for k in data["tables"] if k in _SECTIONS]
        out += ["", f"tables (--section NAME): {', '.join(names)}"]
    return out


def _table_lines(tables: Mapping[str, Any]) -> list[str]:
    out = []
    for name, rows in tables.items():
        out.append(name)
        for row in rows:
            cells = [f"{k}: {v}" for k, v in row.items() if k != "evidence"]
            out.append(f"- {'; '.join(cells)} [{']['.join(row['evidence'])}]")
    return out
