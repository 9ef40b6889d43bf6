"""State that has something for every token: one layer and one segment, in contiguous pages.

Pages are allocated once at their final size and filled chunk by chunk, so that a capture never
copies what it already holds. Legend: B rows, K heads, S tokens, H a tensor's own width.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page
from longstraw_backend.kernels.staging import copy_over

from .layer import LayerState
from .placement import ON_DEVICE, Placement, StateKind, bytes_of, room_for

__all__ = ["KVPages", "TokenPages"]


class TokenPages(LayerState):
    """Up to ``capacity`` tokens of one or more [B, K, S, H] tensors, in pages of ``page_tokens``.

    Attributes:
        piece: the named tuple that a page is handed out as; its fields are what is written.
        kind: latents, unless a subclass says otherwise.
    """

    kind: ClassVar[StateKind] = "latent"
    piece: type[Any] = tuple

    def __init__(self, capacity: int, page_tokens: int, placement: Placement = ON_DEVICE) -> None:
        self.capacity = capacity
        self.page_tokens = page_tokens
        self.on_host = self.kind in placement.host
        self._pages: list[tuple[Tensor, ...]] = []

    def write(self, start: int, *values: Tensor) -> None:
        """Write tokens at [start, start + T). Writing the same place again is allowed: only the
        segment's length makes tokens visible. Nothing waits for the device: before the CPU reads
        pages in its memory, the device must be waited for."""
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
                copy_over(kept[:, :, offset : offset + count], new[:, :, done : done + count])
            done += count

    def _allocate(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        size = min(self.page_tokens, self.capacity - len(self._pages) * self.page_tokens)
        return tuple(
            room_for((*x.shape[:2], size, x.shape[3]), like=x, host=self.on_host) for x in values
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
        return sum(bytes_of(x) for page in self._pages for x in page)


class KVPages(TokenPages):
    """Keys (after norm and RoPE) and values of an attention layer, [B, K, S, H] each."""

    kind = "attention"
    piece = Page
