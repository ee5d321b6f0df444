"""The worked examples of the skill's FA page: code templates rendered with the contexts of a data file."""

from __future__ import annotations

from kvskill.opsinfo.facts import reference_data
from kvskill.opsinfo.templates import render_template

__all__ = ["worked_examples"]


def worked_examples() -> str:
    """Markdown of all examples in `references/skill_pages/examples.yaml`."""
    out = []
    for number, row in enumerate(reference_data("skill_pages/examples")["examples"], start=1):
        out.append(f"### {number}. {row['title']}\n\n{row['text']}")
        for part in row["parts"]:
            code = render_template(part["template"], part["context"]).strip("\n")
            out.append(f"{part['what']} (template `{part['template']}`)\n\n```python\n{code}\n```")
    return "\n\n".join(out)
