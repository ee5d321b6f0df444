"""Byte-range edits: they never overlap, and bytes outside them stay."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvskill.implementer.edits import EditConflict, EditSet
from kvskill.implementer.names import unbound_names, unused_since
from kvskill.implementer.textops import insert_after, insert_before, remove_statements, statements
from kvskill.source import SourceFile, read_source

TEXT = "import os\n\n\ndef f(a):\n    # first\n    b = a + 1\n    # second\n    c = b + 2  # tail\n    return c\n"


def source(tmp_path: Path, text: str | bytes = TEXT) -> SourceFile:
    path = tmp_path / "m.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_source(path)


def func(file: SourceFile) -> ast.FunctionDef:
    found = file.tree.body[1]
    assert isinstance(found, ast.FunctionDef)
    return found


def test_overlap_is_refused(tmp_path: Path) -> None:
    edits = EditSet(source(tmp_path))
    edits.add(0, 6, "x", "one")
    edits.add(3, 8, "y", "two")
    with pytest.raises(EditConflict):
        edits.result()


def test_insertions_keep_their_order(tmp_path: Path) -> None:
    edits = EditSet(source(tmp_path, "ab\n"))
    edits.add(1, 1, "1", "one")
    edits.add(1, 1, "2", "two")
    edits.add(1, 2, "B", "three")
    assert edits.result() == b"a12B\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_removal_takes_its_own_comment_and_keeps_line_ends(tmp_path: Path, newline: str) -> None:
    file = source(tmp_path, TEXT.replace("\n", newline).encode())
    edits = EditSet(file)
    node = func(file)
    remove_statements(edits, node, {node.body[0]}, "gone")
    insert_before(edits, node.body[2], "d = 3\n", "new")
    want = "import os\n\n\ndef f(a):\n    # second\n    c = b + 2  # tail\n    d = 3\n    return c\n"
    assert edits.result() == want.replace("\n", newline).encode()


def test_text_inserted_among_removed_blank_lines_stays(tmp_path: Path) -> None:
    text = "def f(a):\n\n    # own\n    b = 1\n\n\n    return a\n"
    edits = EditSet(source(tmp_path, text))
    node = edits.file.tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    remove_statements(edits, node, {node.body[0]}, "gone")
    insert_after(edits, node.body[0], "c = 2\n", "new")
    assert edits.result().decode() == "def f(a):\n\n    c = 2\n\n\n    return a\n"


GROUP = "import os\n\n\ndef f(a):\n    # both\n    b = a + 1\n    c = a + 2\n\n    # own\n    return a\n"


@pytest.mark.parametrize(
    ("gone", "want"),
    [
        ([0], "    # both\n    c = a + 2\n\n    # own\n    return a\n"),  # it may speak of what stays
        ([0, 1], "    # own\n    return a\n"),
        ([1], "    # both\n    b = a + 1\n\n    # own\n    return a\n"),
    ],
)
def test_a_comment_above_a_group_stays_with_its_rest(tmp_path: Path, gone: list[int], want: str) -> None:
    edits = EditSet(source(tmp_path, GROUP))
    node = func(edits.file)
    remove_statements(edits, node, {node.body[i] for i in gone}, "gone")
    assert edits.result().decode() == "import os\n\n\ndef f(a):\n" + want


def test_directives_are_no_comments_of_a_statement(tmp_path: Path) -> None:
    text = GROUP.replace("# both", "# fmt: off")
    edits = EditSet(source(tmp_path, text))
    node = func(edits.file)
    remove_statements(edits, node, set(node.body[:2]), "gone")
    assert "# fmt: off" in edits.result().decode()


def test_tabs_are_kept(tmp_path: Path) -> None:
    file = source(tmp_path, "def f(a):\n\tif a:\n\t\tb = 1\n\treturn a\n")
    edits = EditSet(file)
    node = file.tree.body[0]
    insert_after(edits, node.body[0], "if a:\n    c = 2\n", "new", unit="\t")
    assert edits.result() == b"def f(a):\n\tif a:\n\t\tb = 1\n\tif a:\n\t\tc = 2\n\treturn a\n"


def test_a_block_left_empty_goes_with_its_head(tmp_path: Path) -> None:
    file = source(tmp_path, "def f(a):\n    if a:\n        b = 1\n    else:\n        b = 2\n    return a\n")
    edits = EditSet(file)
    node = file.tree.body[0]
    gone = {s for s in statements(node.body) if s.lineno in (3, 5)}
    remove_statements(edits, node, gone, "gone")
    assert edits.result() == b"def f(a):\n    return a\n"


def test_one_side_left_empty_gets_pass(tmp_path: Path) -> None:
    file = source(tmp_path, "def f(a):\n    if a:\n        b = 1\n    else:\n        b = 2\n    return a\n")
    edits = EditSet(file)
    node = file.tree.body[0]
    remove_statements(edits, node, {s for s in statements(node.body) if s.lineno == 3}, "gone")
    assert edits.result() == b"def f(a):\n    if a:\n        pass\n    else:\n        b = 2\n    return a\n"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.text("xy", max_size=3)), max_size=6))
def test_bytes_outside_edits_stay(tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, str]]) -> None:
    raw = bytes(range(65, 65 + 26)) * 2 + b"\n"
    file = source(tmp_path_factory.mktemp("m"), b"'''" + raw.replace(b"\\", b"/") + b"'''\n")
    edits = EditSet(file)
    for a, b, text in spans:
        edits.add(3 + min(a, b), 3 + max(a, b), text, "any")
    try:
        ordered = edits.ordered()
    except EditConflict:
        return
    rest, pos = b"", 0
    for e in ordered:
        rest += file.raw[pos : e.start]
        pos = e.end
    rest += file.raw[pos:]
    out = edits.result()
    for e in reversed(ordered):  # undo by position
        del e
    assert len(out) == len(rest) + sum(len(e.text) for e in ordered)


@pytest.mark.parametrize(
    ("text", "unbound"),
    [
        ("import os\ndef f(a):\n    b = a\n    return b + os.sep + len(c)\n", {"c"}),
        ("def f():\n    global g\n    g = 1\ndef h():\n    return g\n", set()),
        ("class A:\n    x = 1\n    y = x\n    def m(self):\n        return [i for i in y]\n", {"y"}),
        ("def f(a):\n    def g():\n        return a + z\n    return g\nz = 1\n", set()),
        ("print(__name__, late)\n", {"late"}),
        ("class A(B):\n    def m(self):\n        return super().m(__class__)\n", {"B"}),
    ],
)
def test_unbound_names(text: str, unbound: set[str]) -> None:
    assert unbound_names(text, "x.py") == unbound


BEFORE = """
def repeat(x): return x
def eager(x): return repeat(x)
def mask(): ...
def never(): ...
def named(): ...
class A:
    def f(self): return eager(mask()), getattr(self, "named"), self.g()
    def g(self): ...
"""


def test_helpers_that_only_unused_helpers_call_are_unused() -> None:
    after = BEFORE.replace("eager(mask())", "mask()").replace(", self.g()", "")
    found = unused_since([ast.parse(BEFORE)], [ast.parse(after)])
    assert [n.name for n in found] == ["repeat", "eager", "g"]
