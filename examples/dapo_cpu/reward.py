"""The reward of the demo: the share of the code's words that the response has in the right place."""

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

    One word right of four gives 0.25. Extra words count as wrong places, so a response that lists every
    word it saw earns less than one that answers.
    """
    given, wanted = solution_str.split(), ground_truth.split()
    hits = sum(a == b for a, b in zip(given, wanted, strict=False))
    return hits / max(len(given), len(wanted))
