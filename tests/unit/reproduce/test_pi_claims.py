"""The claims' verdicts, on measurements whose verdict is worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ctxext.reproduce.pi_claims import Claim, Measured, Measurement, check_claims

# A run that shows what the paper shows: L = 256, s = 4.
GOOD: dict[tuple[str, int, int, str, int], tuple[Mapping[int, float], int]] = {
    ("direct", 4, 0, "text", 0): ({128: 12.0, 256: 10.0, 512: 20.0, 1024: 40.0}, 256),
    ("direct", 4, 0, "text", 1000): ({128: 12.0, 256: 10.0, 512: 9.5, 1024: 9.4}, 500),
    ("linear", 4, 0, "text", 0): ({128: 29.0, 256: 29.0, 512: 29.0, 1024: 29.0}, 0),
    ("linear", 4, 0, "text", 200): ({256: 10.5, 1024: 9.0}, 1024),
    ("linear", 4, 0, "text", 1000): ({128: 12.2, 256: 10.1, 512: 9.2, 1024: 8.8}, 1024),
    ("linear", 4, 0, "other", 1000): ({128: 13.0, 256: 10.5, 512: 9.5, 1024: 9.2}, 1024),
}
NAMES = ("extrapolation", "below", "retrieves", "direct_tuning", "longer", "original", "examples")


def claims(**changes: Any) -> dict[str, Claim]:
    """Return the claims on GOOD, with some measurements replaced."""
    rows = dict(GOOD)
    rows.update(changes.get("rows", {}))
    measured = Measured(
        256, "text", [Measurement(*key, perplexity=value[0], k_max=value[1]) for key, value in rows.items()]
    )
    return dict(zip(NAMES, check_claims(measured), strict=True))


def test_what_the_paper_shows_holds() -> None:
    found = claims()
    assert {name: claim.holds for name, claim in found.items()} == dict.fromkeys(NAMES, True)
    assert found["extrapolation"].found == [{"where": "direct x4", "figure": "4.00 times", "holds": True}]
    assert found["retrieves"].found[0]["figure"] == "at step 200"
    assert found["original"].found[0]["figure"] == "1.010 times"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("extrapolation", ("direct", 4, 0, "text", 0), ({256: 10.0, 1024: 29.9}, 256)),
        ("below", ("linear", 4, 0, "text", 0), ({256: 30.0, 1024: 40.0}, 0)),
        ("direct_tuning", ("direct", 4, 0, "text", 1000), ({256: 10.0, 1024: 9.4}, 512)),
        ("longer", ("linear", 4, 0, "text", 1000), ({128: 12.0, 256: 10.1, 512: 9.0, 1024: 9.0}, 1024)),
        ("original", ("linear", 4, 0, "text", 1000), ({256: 10.21, 512: 9.0, 1024: 8.8}, 1024)),
        ("examples", ("linear", 4, 0, "other", 1000), ({256: 10.5, 1024: 9.25}, 1024)),
        ("examples", ("linear", 4, 0, "other", 1000), ({256: 10.5, 1024: 9.0}, 1000)),
    ],
)
def test_a_miss_by_little_fails_that_claim_alone(name: str, key: Any, value: Any) -> None:
    found = claims(rows={key: value})
    assert [other for other, claim in found.items() if not claim.holds] == [name]


def test_a_retrieval_that_never_comes_fails_with_the_best_that_came() -> None:
    late = {key: (value[0], 700) for key, value in GOOD.items() if key[:4] == ("linear", 4, 0, "text") and key[4]}
    claim = claims(rows=late)["retrieves"]
    assert claim.holds is False and claim.found[0]["figure"] == "at most 700 (step 200)"


def test_one_bad_seed_fails_a_claim() -> None:
    seed = {("linear", 4, 1, "text", 1000): ({256: 11.0, 512: 9.2, 1024: 8.8}, 1024)}
    claim = claims(rows=seed)["original"]
    assert claim.holds is False and [row["holds"] for row in claim.found] == [True, False]


def test_a_short_run_leaves_claims_undecided() -> None:
    rows = [Measurement("linear", 4, 0, "text", 100, {256: 10.0, 1024: 9.0}, 300)]
    verdicts = [claim.holds for claim in check_claims(Measured(256, "text", rows))]
    assert verdicts == [None] * len(NAMES)
