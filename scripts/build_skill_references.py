#!/usr/bin/env python3
"""Build the skill's reference pages and the rule index from the data in `references/` and the code templates.

    build_skill_references.py            # write the pages
    build_skill_references.py --check    # exit 1 when a page differs from what would be written

Sources: `references/skill_pages/*.md.j2` (prose), `references/operators/*.yaml`, `references/topics.yaml`,
`references/common_errors.yaml`, `references/framework.yaml`, `references/rules/registry.yaml`, `templates/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kvskill.opsinfo import load_operators, reference_data
from kvskill.skillpack.examples import worked_examples
from kvskill.verifier.backend.schemas import load_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "references/skill_pages"
OUT = ROOT / "skills/model-infer-kvcache/references"
INDEX = ROOT / "references/rules/README.md"
_MARK = "<!-- built by scripts/build_skill_references.py; edit references/ instead -->"
_CORE = """softmax scale; query heads; KV heads; query lengths; KV lengths; mask; visible set; band; layout;
page table; page size; MLA rope parts; attention sink; LSE switch""".replace("\n", " ").split("; ")


def letters(evidence: Iterable[str]) -> str:
    """`[K][U]`."""
    return "".join(f"[{e}]" for e in evidence)


def cell(value: Any) -> str:
    """A table cell; evidence lists become letters, bars are escaped."""
    text = letters(value) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


def rows(items: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    """A Markdown table of the given columns."""
    head = [c if c.startswith("torch_npu") else c.replace("_", " ") for c in columns]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(item.get(c, "")) for c in columns) + " |" for item in items]
    return "\n".join(lines)


def topic(name: str) -> str:
    """The points of a topic as a list."""
    points = reference_data("topics")["topics"][name]["points"]
    return "\n".join(f"- {text} {letters(evidence)}" for text, evidence in points)


def errors() -> str:
    """The common errors, one section each kind of entry, in file order."""
    out = []
    for name, row in reference_data("common_errors")["errors"].items():
        out.append(
            f"**{name}** ({row['symptom']}) {row['pattern']} / {row['zh']}\n"
            f"- cause: {row['cause']} {letters(row['evidence'])}\n"
            f"- cure: {row['cure']}"
        )
    return "\n\n".join(out)


def since(operator: str) -> str:
    """The release trains that register an operator, in words."""
    table = load_table()
    built: dict[str, str] = {}
    have: set[str] = set()
    for release in table.releases:
        facts = table.facts(release)
        train = facts["train"]
        built[train] = min(built.get(train, facts.get("built", "9")), facts.get("built", "9"))
        if any(k.split(".")[0] == operator for k in table.schemas(release)):
            have.add(train)
    order = sorted(built, key=lambda t: built[t])
    if not have:
        return "not in the table"
    first = next(t for t in order if t in have)
    assert have == set(order[order.index(first) :]), operator
    return "all of the table" if first == order[0] else f"from train {first} ({built[first][:7]})"


def operator_table() -> str:
    """One row for each operator: use, results, releases."""
    items = [
        {"operator": f"`{o.name}`", "use": o.use, "returns": o.returns, "torch_npu releases": since(o.name)}
        for o in load_operators().values()
    ]
    return rows(items, ["operator", "use", "returns", "torch_npu releases"])


def operator_facts() -> str:
    """The facts of every operator; the attention facts once, the shared MLA write facts once."""
    out, seen = [], set()
    for op in load_operators().values():
        if not op.facts or op.facts in seen:
            continue
        seen.add(op.facts)
        names = [o.name for o in load_operators().values() if o.facts == op.facts]
        body = "\n".join(f"- {f.fact} {letters(f.evidence)}" for f in op.facts)
        out.append(f"### {', '.join(f'`{n}`' for n in names)}\n\n{body}")
    return "\n\n".join(out)


def core_arguments() -> list[dict[str, Any]]:
    """The arguments that a cache rewrite sets."""
    by_meaning = {r["meaning"]: r for r in reference_data("operators/fused_infer_attention")["argument_map"]}
    return [by_meaning[m] for m in _CORE]


def features() -> str:
    """The advanced features that the analyzer recognises and hands over."""
    data = yaml.safe_load((ROOT / "src/kvskill/data/features.yaml").read_text(encoding="utf-8"))["features"]
    items = [
        {
            "feature": row["title"],
            "how it shows": ", ".join(f"`{n}`" for n in [*row["yaml"], *row["names"]][:5]),
            "what to do": f"{row['note']} Skill: {row['skill']}. `kvskill explain {row['code']}`",
        }
        for row in data.values()
    ]
    return rows(items, ["feature", "how it shows", "what to do"])


def build_pages() -> dict[Path, str]:
    """Every generated page by path."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    env.globals.update(
        rows=rows,
        topic=topic,
        errors=errors,
        features=features,
        operator_table=operator_table,
        operator_facts=operator_facts,
        core_arguments=core_arguments,
        examples=worked_examples,
        fa=reference_data("operators/fused_infer_attention"),
        framework=reference_data("framework"),
    )
    pages = {}
    for source in sorted(PAGES.glob("*.md.j2")):
        text = env.get_template(source.name).render().rstrip() + "\n"
        title, _, rest = text.partition("\n")
        pages[OUT / source.name.removesuffix(".j2")] = f"{title}\n{rest.rstrip()}\n\n{_MARK}\n"
    pages[INDEX] = rule_index()
    return pages


def rule_index() -> str:
    """The list of all diagnostic codes, by part."""
    parts = {"0": "Input", "1": "Analysis", "2": "Apply", "3": "Check", "4": "Verify", "9": "Internal"}
    registry = reference_data("rules/registry")
    out = ["# Diagnostic codes", "", "`kvskill explain CODE` prints a page."]
    for digit, name in parts.items():
        codes = [c for c in sorted(registry) if c[2] == digit]
        if codes:
            out += ["", f"## {name}", ""]
            out += [f"- [{c}]({c}.md) `{registry[c]['name']}`: {registry[c]['summary']}" for c in codes]
    return "\n".join([*out, "", _MARK, ""])


def main(argv: list[str] | None = None) -> int:
    """Write or compare; returns the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args(argv)
    stale = []
    for path, text in build_pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{'differs' if args.check else 'wrote'} {name}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
