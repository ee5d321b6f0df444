"""Figures: relative to the reference's largest logit, NaN never agrees, absence is not agreement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvskill.verifier.compare import compare, first_difference


def arrays(rows: dict[int, list[float]]) -> dict[str, Any]:
    at = sorted(rows)
    return {"positions/0": np.array(at), "logits/0": np.array([rows[p] for p in at], dtype=np.float32)}


REFERENCE = arrays({4: [2.0, -10.0], 5: [1.0, 0.0], 6: [0.5, 3.0]})


def one(tested: dict[str, Any], tolerance: float = 1e-4, **kwargs: Any) -> Any:
    return compare("HF", REFERENCE, tested, [5], tolerance, **kwargs)[0]


def test_difference_is_relative_to_the_largest_reference_logit() -> None:
    found = one(arrays({4: [2.0, -10.0], 5: [1.5, 0.0], 6: [0.5, 3.0]}))
    assert found.relative == pytest.approx(0.05)
    assert (found.first_bad, found.ok) == (5, False)
    assert one(arrays({4: [2.0, -10.0], 5: [1.0005, 0.0], 6: [0.5, 3.0]})).ok


def test_nan_never_agrees() -> None:
    found = one(arrays({4: [2.0, -10.0], 5: [np.nan, 0.0], 6: [0.5, 3.0]}))
    assert (found.nan, found.first_bad, found.ok) == (1, 5, False)


def test_nan_in_the_reference_never_agrees() -> None:
    broken = arrays({4: [2.0, np.nan], 5: [1.0, 0.0], 6: [0.5, 3.0]})
    found = compare("HF", broken, REFERENCE, [5], 1e-4)[0]
    assert (found.nan, found.first_bad, found.ok) == (1, 4, False)


def test_infinities_agree_only_with_the_same_ones_and_do_not_hide_other_differences() -> None:
    masked = arrays({4: [2.0, -np.inf], 5: [1.0, -np.inf], 6: [3.0, -np.inf]})
    assert compare("HF", masked, masked, [5], 1e-4)[0].ok
    other = arrays({4: [2.0, -np.inf], 5: [1.5, -np.inf], 6: [3.0, -np.inf]})
    found = compare("HF", masked, other, [5], 1e-4)[0]
    assert found.relative == pytest.approx(0.5 / 3) and (found.first_bad, found.ok) == (5, False)
    for wrong in (np.inf, 0.0):
        found = compare("HF", masked, arrays({4: [2.0, -np.inf], 5: [1.0, wrong], 6: [3.0, -np.inf]}), [5], 1e-4)[0]
        assert found.relative == np.inf and (found.first_bad, found.ok) == (5, False)


def test_missing_positions_are_no_agreement() -> None:
    assert one(arrays({4: [2.0, -10.0], 6: [0.5, 3.0]})).missing == 1
    assert not one({}).ok
    assert one(arrays({4: [2.0, -10.0]})).ok, "the tested party ran fewer steps"


def test_outliers_only_where_they_are_allowed() -> None:
    tested = arrays({4: [2.0, -10.0], 5: [9.0, 0.0], 6: [0.5, 3.0]})
    assert not one(tested).ok
    assert one(tested, outliers=0.1).ok
    assert not one(arrays({4: [9.0, 0.0], 5: [9.0, 0.0], 6: [0.5, 3.0]}), outliers=0.1).ok


def test_first_layer_that_differs() -> None:
    def hidden(values: dict[str, list[list[float]]]) -> dict[str, Any]:
        out = arrays({4: [0.0, 0.0]})
        for key, candidates in values.items():
            out[f"hidden/0/{key}"] = np.array(candidates)[:, None, :]
            out[f"hidden_positions/0/{key}"] = np.array([4])
        return out

    reference = hidden({"0.attention": [[1.0, 2.0]], "0.layer": [[3.0, 4.0]], "1.attention": [[5.0, 6.0]]})
    # a layer may give out residual and update: their sum is a candidate
    tested = hidden(
        {"0.attention": [[1.0, 2.0]], "0.layer": [[1.0, 1.0], [2.0, 3.0], [3.0, 4.0]], "1.attention": [[5.0, 6.5]]}
    )
    assert first_difference(reference, tested, 0, 4, 1e-4) == (1, "attention")
    assert first_difference(reference, reference, 0, 4, 1e-4) is None
    tested["hidden/0/0.layer"] = np.full((1, 1, 2), np.nan)
    assert first_difference(reference, tested, 0, 4, 1e-4) == (0, "layer")
