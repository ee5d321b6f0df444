"""The worked examples of the skill's FA page: code templates rendered with the values of a data file."""

from __future__ import annotations

from kvskill.opsinfo.facts import reference_data
from kvskill.opsinfo.templates import default_context, render_template

__all__ = ["worked_examples"]


def worked_examples() -> str:
    """Markdown of all examples in `references/skill_pages/examples.yaml`."""
    out = []
    for number, row in enumerate(reference_data("skill_pages/examples")["examples"], start=1):
        context = {**default_context(row["template"]), **row["change"]}
        code = render_template(row["template"], context).strip("\n")
        text = f"{row['text']} Template `{row['template']}`."
        out.append(f"### {number}. {row['title']}\n\n{text}\n\n```python\n{code}\n```")
    return "\n\n".join(out)
