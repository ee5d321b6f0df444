"""The worked examples of the skill's FA page: code templates rendered with the values of a data file."""

from __future__ import annotations

from kvskill.opsinfo.facts import reference_data
from kvskill.opsinfo.templates import default_context, render_template

__all__ = ["worked_examples"]


def worked_examples() -> str:
    """Markdown of all examples in `references/skill_pages/examples.yaml`.

    The first example with a template is printed whole, the others from where their code differs from it.
    """
    out: list[str] = []
    whole: dict[str, tuple[int, list[str]]] = {}
    for number, row in enumerate(reference_data("skill_pages/examples")["examples"], start=1):
        code: list[str] = []
        for name in row["templates"]:
            lines = render_template(name, {**default_context(name), **row["change"]}).strip("\n").split("\n")
            first, before = whole.setdefault(name, (number, lines))
            if first != number:
                lines = [f"# ... as in example {first} up to here", *lines[_difference(before, lines) :]]
            code += lines
        names = " and ".join(f"`{name}`" for name in row["templates"])
        body = "\n".join(code)
        out.append(f"### {number}. {row['title']}\n\n{row['text']} Template {names}.\n\n```python\n{body}\n```")
    return "\n\n".join(out)


def _difference(before: list[str], after: list[str]) -> int:
    """The first line that differs, or the top-level line that its block begins with."""
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after) - 1)
    while common > 0 and after[common].startswith((" ", ")")):
        common -= 1
    return common
