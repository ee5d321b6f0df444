"""The evidence table of README.md, from templates/verification.json.

`python scripts/evidence_table.py` prints it; `--write` puts it between the markers of both READMEs; `--check` exits 1
when a README does not hold the table as it is now.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- evidence:begin -->", "<!-- evidence:end -->"
HEADS = {
    "README.md": ("Template", "Binds to", "Meta", "Reference", "In the framework or a runner", "NPU"),
    "README.zh-CN.md": ("模板", "可绑定版本", "Meta", "参考实现", "框架或 runner 内运行", "NPU"),
}


CAPTIONS = {
    "README.md": "What the code templates were verified against, from `templates/verification.json` "
    "(`kvskill verify --templates`; torch_npu {torch_npu}, profile {profile}). Figures are relative errors.",
    "README.zh-CN.md": "代码模板的验证依据，来自 `templates/verification.json`"
    "（`kvskill verify --templates`；torch_npu {torch_npu}，规则集 {profile}）。数值为相对误差。",
}


def table(ledger: dict[str, Any], name: str) -> str:
    """Caption and table in Markdown, one row per template."""
    heads = HEADS[name]
    lines = [CAPTIONS[name].format(**ledger["tool"]), "", "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for template, entry in sorted(ledger["templates"].items()):
        cells = [
            f"`{template}`",
            _binds(entry.get("binds", {})),
            _cases(entry.get("meta")),
            _cases(entry.get("reference")),
            _framework(entry.get("framework")),
            _npu(entry.get("npu", "not run")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _binds(binds: dict[str, Any]) -> str:
    if not binds:
        return "not run"
    parts = []
    for title, releases in binds.items():
        prefix = "" if title == "any" else f"{title}: "
        count = (
            releases
            if isinstance(releases, str)
            else f"{len(releases)} releases, from {releases[0]}"
            if releases
            else "none"
        )
        parts.append(prefix + {"any": "calls no operator", "all": "all releases"}.get(count, count))
    return "<br>".join(dict.fromkeys(parts))


def _cases(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value or "not run")
    worst = f", worst {value['worst']:.0e}" if value.get("worst") is not None else ""
    return f"{value['cases']} cases{worst}"


def _framework(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value or "not run")
    return f"{len(value)} runs, worst {max(value.values()):.0e}"


def _npu(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return f"{value['cases']} cases on {value['soc']}, CANN {value['cann']}, torch_npu {value['torch_npu']}"


def main() -> int:
    """Print, write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    ledger = json.loads((ROOT / "templates" / "verification.json").read_text(encoding="utf-8"))
    if not options.write and not options.check:
        print(table(ledger, "README.md"))
        return 0
    stale = 0
    for name in HEADS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if START not in text or END not in text:
            print(f"{name} has no evidence markers")
            stale = 1
            continue
        before, rest = text.split(START, 1)
        after = rest.split(END, 1)[1]
        new = f"{before}{START}\n{table(ledger, name)}\n{END}{after}"
        if new != text:
            if options.write:
                path.write_text(new, encoding="utf-8")
            else:
                print(f"{name} does not hold the present evidence table; run scripts/evidence_table.py --write")
                stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
