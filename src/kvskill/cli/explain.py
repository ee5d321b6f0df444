"""`kvskill explain`: one diagnostic code, selection rule, topic, common error or role, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import click

from kvskill.cli._bounded import emit, json_option, lines_option, unknown_name


def _rules() -> Mapping[str, Mapping[str, str]]:
    from kvskill.opsinfo.facts import reference_data

    data: Mapping[str, Mapping[str, str]] = reference_data("rules/registry")
    return data


def _topics() -> Mapping[str, Any]:
    from kvskill.opsinfo.facts import reference_data

    data: Mapping[str, Any] = reference_data("topics")["topics"]
    return data


def _errors() -> Mapping[str, Any]:
    from kvskill.opsinfo.facts import reference_data

    data: Mapping[str, Any] = reference_data("common_errors")["errors"]
    return data


def _code(code: str) -> dict[str, Any]:
    rule = _rules()[code]
    page = resources.files("kvskill").joinpath(f"references/rules/{code}.md")
    short = f"# {rule['name']} ({code})\n\n{rule['summary']}\n"
    body = page.read_text(encoding="utf-8") if page.is_file() else short
    return {"kind": "code", "name": code, "rule": rule["name"], "summary": rule["summary"], "text": body}


def _topic(name: str) -> dict[str, Any]:
    row = _topics()[name]
    lines = [row["title"], *(f"- {text} [{']['.join(evidence)}]" for text, evidence in row["points"])]
    if row["see"]:
        lines += ["", f"see also: {', '.join(row['see'])}"]
    lines.append("letters: kvskill explain evidence; NPU: not run")
    points = [{"text": t, "evidence": e} for t, e in row["points"]]
    return {"kind": "topic", "name": name, "title": row["title"], "points": points, "text": "\n".join(lines)}


def _error(name: str) -> dict[str, Any]:
    row = _errors()[name]
    text = (
        f"{row['pattern']}\n{row['zh']}\nsymptom: {row['symptom']}\ncause: {row['cause']} "
        f"[{']['.join(row['evidence'])}]\ncure: {row['cure']}\nseed: {row['seed']}\n"
        f"see also: {', '.join(row['see'])}\n"
        "letters: kvskill explain evidence; NPU: not run"
    )
    return {"kind": "common error", "name": name, **row, "text": text}


def _selection(name: str) -> dict[str, Any]:
    from kvskill.analyzer.selection.rules import all_rules, rule_page

    rule = all_rules()[name]
    return {"kind": "selection rule", "name": name, "title": rule.title, "table": rule.table, "text": rule_page(rule)}


def _selection_rules() -> dict[str, str]:
    """Selection rule ids by their lower-case form (the manifest names them as evidence)."""
    from kvskill.analyzer.selection.rules import all_rules

    return {r.lower(): r for r in all_rules()}


def _role(name: str) -> dict[str, Any]:
    from kvskill.skillpack.pack import role_texts

    return {"kind": "role", "name": name, "text": role_texts()[name.removeprefix("role-")]}


def _look_up(name: str) -> dict[str, Any]:
    from kvskill.skillpack.pack import ROLES

    rules = _rules()
    by_rule = {row["name"]: code for code, row in rules.items()}
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if name.upper() in rules:
        return _code(name.upper())
    if plain in _selection_rules():
        return _selection(_selection_rules()[plain])
    if plain in _topics():
        return _topic(plain)
    if plain in _errors():
        return _error(plain)
    if plain in by_rule:
        return _code(by_rule[plain])
    if plain.removeprefix("role-") in ROLES:
        return _role(plain)
    known = [*rules, *by_rule, *_topics(), *_errors(), *_selection_rules().values(), *(f"role-{r}" for r in ROLES)]
    raise unknown_name("code, rule, topic, error or role", name, known)


def _overview() -> dict[str, list[str]]:
    from kvskill.skillpack.pack import ROLES

    return {
        "topics": list(_topics()),
        "common errors": list(_errors()),
        "codes": [f"{code} {row['name']}" for code, row in _rules().items()],
        "selection rules": list(_selection_rules().values()),
        "roles": [f"role-{r}" for r in ROLES],
    }


@click.command()
@click.argument("name", required=False, metavar="[CODE|RULE|TOPIC]")
@lines_option(100)
@json_option
def explain(name: str | None, lines: int, as_json: bool) -> None:
    """Explain a finding code (KV012), a rule by name (S13-paged), a topic (window), a common error or a role.

    Without a name: list what there is.
    """
    if name is None:
        overview = _overview()
        if as_json:
            click.echo(json.dumps(overview, indent=1, ensure_ascii=False))
            return
        text: list[str] = []
        for kind, names in overview.items():
            text += [f"{kind}:", *(f"  {n}" for n in names)]
        emit(text, lines)
        return
    found = _look_up(name)
    if as_json:
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        emit(found["text"], lines)
