"""Key/value pages of one layer: what is written is what is seen, and where it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw_backend.state import KVPages


def tokens(start: int, stop: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, 2, stop - start, 3] that tell their position; values are negative."""
    k = torch.arange(start, stop, dtype=torch.float32) + 1
    k = k[:, None].expand(rows, 2, -1, 3) * torch.tensor([1.0, 100.0])[:, None, None]
    return k.clone(), -k


def seen(pages: KVPages, length: int) -> tuple[Tensor, Tensor]:
    k, v = zip(*pages.visible(length), strict=True)
    return torch.cat(k, dim=2), torch.cat(v, dim=2)


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("cuts", [(0, 11), (0, 1, 11), (0, 3, 4, 8, 11), tuple(range(12))])
def test_writes_across_page_borders_are_seen_whole(page_tokens: int, cuts: tuple[int, ...]) -> None:
    pages = KVPages(11, page_tokens)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        pages.write(start, *tokens(start, stop))
    for length in range(1, 12):
        for got, expected in zip(seen(pages, length), tokens(0, length), strict=True):
            assert torch.equal(got, expected)


def test_pages_are_as_large_as_asked_and_the_last_fits_the_capacity() -> None:
    pages = KVPages(11, 4)
    pages.write(0, *tokens(0, 11))
    assert [page.k.shape[2] for page in pages.visible(11)] == [4, 4, 3]
    assert [page.k.shape[2] for page in pages.visible(5)] == [4, 1]
    assert pages.visible(0) == []


def test_pages_are_allocated_when_first_written() -> None:
    pages = KVPages(11, 4)
    assert pages.nbytes == 0
    pages.write(0, *tokens(0, 1))
    one_page = 2 * 2 * 4 * 3 * 4  # k and v, heads, tokens, head dim, bytes
    assert pages.nbytes == one_page
    pages.write(1, *tokens(1, 5))
    assert pages.nbytes == 2 * one_page


def test_writing_the_same_place_again_replaces_it() -> None:
    pages = KVPages(11, 4)
    pages.write(0, *tokens(0, 3))
    pages.write(3, *(torch.full_like(t, float("nan")) for t in tokens(3, 9)))
    pages.write(3, *tokens(3, 9))
    for got, expected in zip(seen(pages, 9), tokens(0, 9), strict=True):
        assert torch.equal(got, expected)


def test_visible_pages_are_views_not_copies() -> None:
    pages = KVPages(8, 8)
    pages.write(0, *tokens(0, 4))
    (before,) = pages.visible(4)
    pages.write(0, *(2 * t for t in tokens(0, 4)))
    (after,) = pages.visible(3)
    assert torch.equal(before.k, 2 * tokens(0, 4)[0])
    assert before.k.data_ptr() == after.k.data_ptr()
    assert before.k.untyped_storage().nbytes() == 2 * 8 * 3 * 4


def test_what_was_written_is_copied() -> None:
    pages = KVPages(4, 4)
    k, v = tokens(0, 4)
    pages.write(0, k, v)
    k.zero_()
    assert torch.equal(pages.visible(4)[0].k, tokens(0, 4)[0])


def test_rows_are_kept_apart() -> None:
    pages = KVPages(5, 2)
    k, v = (t * torch.tensor([1.0, 7.0])[:, None, None, None] for t in tokens(0, 5, rows=2))
    pages.write(0, k, v)
    for got, expected in zip(seen(pages, 5), (k, v), strict=True):
        assert torch.equal(got, expected)


def test_more_than_the_capacity_is_our_own_mistake() -> None:
    pages = KVPages(4, 2)
    with pytest.raises(AssertionError, match="segment of 4 tokens can't hold 5"):
        pages.write(2, *tokens(2, 5))
