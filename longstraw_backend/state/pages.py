"""Keys and values of one layer and one segment, in contiguous pages.

Pages are allocated once at their final size and filled chunk by chunk, so that a capture never
copies what it already holds. Legend: B rows, K key/value heads, S tokens, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page

__all__ = ["KVPages"]


class KVPages:
    """Up to ``capacity`` tokens of [B, K, S, H] keys and values, in pages of ``page_tokens``."""

    def __init__(self, capacity: int, page_tokens: int) -> None:
        self.capacity = capacity
        self.page_tokens = page_tokens
        self._pages: list[Page] = []

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Write tokens at [start, start + T). Writing the same place again is allowed: a walk that
        failed half way can be repeated, since only the segment's length makes tokens visible."""
        stop = start + k.shape[2]
        assert stop <= self.capacity, f"segment of {self.capacity} tokens can't hold {stop}"
        while len(self._pages) * self.page_tokens < stop:
            self._pages.append(self._allocate(k))
        done = 0
        while start + done < stop:
            index, offset = divmod(start + done, self.page_tokens)
            page = self._pages[index]
            count = min(stop - start - done, page.k.shape[2] - offset)
            page.k[:, :, offset : offset + count] = k[:, :, done : done + count]
            page.v[:, :, offset : offset + count] = v[:, :, done : done + count]
            done += count

    def _allocate(self, like: Tensor) -> Page:
        size = min(self.page_tokens, self.capacity - len(self._pages) * self.page_tokens)
        rows, heads, _, dim = like.shape
        k, v = (
            torch.empty(rows, heads, size, dim, dtype=like.dtype, device=like.device)
            for _ in range(2)
        )
        return Page(k, v)

    def visible(self, length: int) -> list[Page]:
        """The pages' first ``length`` tokens, as views."""
        pages = []
        for index, page in enumerate(self._pages):
            count = min(length - index * self.page_tokens, page.k.shape[2])
            if count > 0:
                pages.append(Page(page.k[:, :, :count], page.v[:, :, :count]))
        return pages

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for page in self._pages for t in page)
