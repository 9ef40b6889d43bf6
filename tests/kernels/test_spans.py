"""An owner's pages as spans of positions."""

from __future__ import annotations

import pytest
import torch

from longstraw_backend.kernels.spans import spans_of_runs

RUNS = [range(4, 7), range(7, 7), range(12, 17), range(20, 21)]


@pytest.mark.parametrize("sizes", [[9], [3, 5, 1], [2, 0, 4, 3], [1] * 9])
def test_rows_lie_at_the_positions_of_their_runs(sizes: list[int]) -> None:
    pages = torch.tensor([[p] for run in RUNS for p in run]).split(sizes)
    spans = spans_of_runs(pages, RUNS)
    for span in spans:
        assert span.rows[:, 0].tolist() == list(range(span.start, span.stop))
    assert [p for s in spans for p in range(s.start, s.stop)] == [p for run in RUNS for p in run]


def test_no_pages_have_no_spans() -> None:
    assert spans_of_runs([], []) == []


def test_rejects_another_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="runs: expected the positions of all 8 rows"):
        spans_of_runs([torch.zeros(8, 1)], RUNS)
