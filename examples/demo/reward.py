"""The reward of the demo: the share of the note's four words that stand in their places."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Return the reward in [0, 1]; verl calls this once per response.

    The right answer is the name and four words. The name stands in the question, so it earns
    nothing; each word in its place earns a quarter, and words beyond the four take from it.
    """
    given, wanted = solution_str.split()[1:], ground_truth.split()[1:]
    hits = sum(a == b for a, b in zip(given, wanted, strict=False))
    return hits / max(len(given), len(wanted))
