"""The worked examples of the skill's FA page: code templates rendered with the values of a data file."""

from __future__ import annotations

from kvskill.opsinfo.facts import reference_data
from kvskill.opsinfo.templates import default_context, render_template

__all__ = ["worked_examples"]


def worked_examples() -> str:
    """Markdown of all examples in `references/skill_pages/examples.yaml`.

    The first example of a template is printed whole, the others from where they differ from it.
    """
    out: list[str] = []
    whole: dict[str, tuple[int, list[str]]] = {}
    for number, row in enumerate(reference_data("skill_pages/examples")["examples"], start=1):
        name = row["template"]
        code = render_template(name, {**default_context(name), **row["change"]}).strip("\n").split("\n")
        first, lines = whole.setdefault(name, (number, code))
        if first != number:
            code = [f"# ... as in example {first} up to here", *code[_difference(lines, code) :]]
        body = "\n".join(code)
        out.append(f"### {number}. {row['title']}\n\n{row['text']} Template `{name}`.\n\n```python\n{body}\n```")
    return "\n\n".join(out)


def _difference(before: list[str], after: list[str]) -> int:
    """The first line that differs, or the top-level line that its block begins with."""
    common = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after) - 1)
    while common > 0 and after[common].startswith((" ", ")")):
        common -= 1
    return common
