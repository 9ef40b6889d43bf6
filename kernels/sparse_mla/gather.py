"""Rows of selected tokens out of spans, and their cotangents back into them.

Legend: S queries, K selected tokens of a query, C row width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw_backend.kernels.spans import Span

__all__ = ["gather_rows", "scatter_add_rows"]


def _inside(span: Span, positions: Tensor) -> Tensor:
    """Which of the flat positions lie in the span, as indices into them."""
    return ((positions >= span.start) & (positions < span.stop)).nonzero()[:, 0]


def gather_rows(
    spans: Sequence[Span], selection_SK: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows [S, K, C] in ``dtype``, zero where no span holds the position; where one does, [S, K].

    -1, and on one of several owners a position held by another, are found in no span.
    """
    flat = selection_SK.reshape(-1)
    width = spans[0].rows.shape[1]
    rows = torch.zeros(flat.shape[0], width, dtype=dtype, device=flat.device)
    found = torch.zeros_like(flat, dtype=torch.bool)
    for span in spans:
        where = _inside(span, flat)
        rows[where] = span.rows[flat[where] - span.start].to(dtype)
        found[where] = True
    return rows.reshape(*selection_SK.shape, width), found.reshape(selection_SK.shape)


def scatter_add_rows(into: Span, selection_SK: Tensor, values_SKC: Tensor) -> None:
    """Add the values of those selected tokens that lie in the span to its rows, in place."""
    flat = selection_SK.reshape(-1)
    where = _inside(into, flat)
    values = values_SKC.reshape(-1, values_SKC.shape[-1])
    rows, place = into.rows, flat[where] - into.start
    rows.index_add_(0, place.to(rows.device), values[where].to(rows.device, rows.dtype))
