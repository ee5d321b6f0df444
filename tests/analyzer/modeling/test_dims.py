"""Symbolic sizes: what is equal, what divides, what is not known."""

from __future__ import annotations

import pytest

from kvskill.analyzer.modeling.dims import Dim, const, fresh, product, same

B, S, N = Dim.atom("B"), Dim.atom("S"), Dim.atom("config.heads")


def test_polynomials_have_one_form() -> None:
    both = B * S + S * B
    assert both == const(2) * B * S
    assert (B + S) - S == B
    assert (B - B).value == 0


@pytest.mark.parametrize(
    ("total", "by", "want"),
    [
        (B * S * N, B * S, N),
        (const(6) * B, const(3), const(2) * B),
        (const(6) * B, const(4), None),
        (B, S, None),
        (B * S + B * N, B, S + N),
    ],
)
def test_division_is_exact_or_nothing(total: Dim, by: Dim, want: Dim | None) -> None:
    assert total.divide(by) == want


def test_wildcards_equal_anything_and_are_never_constants() -> None:
    size = fresh()
    assert same(size, B) and same(B * size, const(7))
    assert size.wild and (size * B).wild and size.value is None
    assert not same(B, S)


def test_evaluate_needs_every_atom() -> None:
    size = product([B, N, const(2)])
    assert size.evaluate({"B": 3, "config.heads": 4}) == 24
    assert size.evaluate({"B": 3}) is None
