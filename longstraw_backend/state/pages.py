"""State that has something for every token: one layer and one segment, in contiguous pages.

Pages are allocated once at their final size and filled chunk by chunk, so that a capture never
copies what it already holds. Legend: B rows, K heads, S tokens, H a tensor's own width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page

from .layer import LayerState

__all__ = ["KVPages", "TokenPages"]


class TokenPages(LayerState):
    """Up to ``capacity`` tokens of one or more [B, K, S, H] tensors, in pages of ``page_tokens``.

    Attributes:
        piece: the named tuple that a page is handed out as; its fields are what is written.
    """

    piece: type[Any] = tuple

    def __init__(self, capacity: int, page_tokens: int) -> None:
        self.capacity = capacity
        self.page_tokens = page_tokens
        self._pages: list[tuple[Tensor, ...]] = []

    def write(self, start: int, *values: Tensor) -> None:
        """Write tokens at [start, start + T). Writing the same place again is allowed: only the
        segment's length makes tokens visible."""
        tokens = values[0].shape[2]
        stop = start + tokens
        assert stop <= self.capacity, f"segment of {self.capacity} tokens can't hold {stop}"
        while len(self._pages) * self.page_tokens < stop:
            self._pages.append(self._allocate(values))
        done = 0
        while done < tokens:
            index, offset = divmod(start + done, self.page_tokens)
            page = self._pages[index]
            count = min(tokens - done, page[0].shape[2] - offset)
            for kept, new in zip(page, values, strict=True):
                kept[:, :, offset : offset + count] = new[:, :, done : done + count]
            done += count

    def _allocate(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        size = min(self.page_tokens, self.capacity - len(self._pages) * self.page_tokens)
        return tuple(
            torch.empty(*x.shape[:2], size, x.shape[3], dtype=x.dtype, device=x.device)
            for x in values
        )

    def commit(self, length: int) -> None:
        """Nothing to do: pages are cut to the segment's length when they are read."""

    def visible(self, length: int) -> list[Any]:
        """The pages' first ``length`` tokens, as views."""
        pages = []
        for index, page in enumerate(self._pages):
            count = min(length - index * self.page_tokens, page[0].shape[2])
            if count > 0:
                pages.append(self.piece(*(x[:, :, :count] for x in page)))
        return pages

    def empty(self, capacity: int) -> TokenPages:
        return type(self)(capacity, self.page_tokens)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for page in self._pages for x in page)


class KVPages(TokenPages):
    """Keys (after norm and RoPE) and values of an attention layer, [B, K, S, H] each."""

    piece = Page
