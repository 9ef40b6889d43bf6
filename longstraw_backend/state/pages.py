"""State that has something for every token: one layer and one segment, in contiguous pages.

Pages are allocated once at their final size and filled chunk by chunk, so that a capture never
copies what it already holds. Legend: B rows, K heads, S tokens, H a tensor's own width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from longstraw_backend.kernels.segment_attention import Page
from longstraw_backend.kernels.staging import copy_over

from .layer import LayerState
from .placement import ON_DEVICE, Placement, StateKind, bytes_of, room_for, zeros_for

__all__ = ["KVPages", "TokenPages"]


class TokenPages(LayerState):
    """Up to ``capacity`` tokens of one or more [B, K, S, H] tensors, in pages of ``page_tokens``.

    Attributes:
        piece: the named tuple that a page is handed out as; its fields are what is written.
        kind: latents, unless a subclass says otherwise.
        differentiable: how many of the fields, from the first on, have cotangents.
    """

    kind: ClassVar[StateKind] = "latent"
    piece: type[Any] = tuple
    differentiable: ClassVar[int]

    def __init__(self, capacity: int, page_tokens: int, placement: Placement = ON_DEVICE) -> None:
        self.capacity = capacity
        self.page_tokens = page_tokens
        self.on_host = self.kind in placement.host
        self._pages: list[tuple[Tensor, ...]] = []
        self._cotangents: dict[int, tuple[Tensor, ...]] = {}
        self._own: dict[int, int] = {0: 0}

    def write(self, start: int, *values: Tensor) -> None:
        """Write tokens at [start, start + T). Writing the same place again is allowed: only the
        segment's length makes tokens visible. Nothing waits for the device: before the CPU reads
        pages in its memory, the device must be waited for."""
        tokens = values[0].shape[2]
        start = self._here(start)
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

    def commit(self, length: int, own: int) -> None:
        """Remember how many of the tokens are here; pages are cut to that when they are read."""
        self._own[length] = self._own[next(reversed(self._own))] + own

    def _here(self, length: int) -> int:
        """How many of the first ``length`` tokens this rank has."""
        return self._own.get(length, length)

    def visible(self, length: int) -> list[Any]:
        """The pages' first ``length`` tokens, as views."""
        return [
            self.piece(*(x[:, :, :count] for x in self._pages[index]))
            for index, _, count in self._parts(0, self._here(length))
        ]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Pages of this rank's tokens [start, stop): number, first token within, count."""
        while start < stop:
            index, offset = divmod(start, self.page_tokens)
            count = min(stop - start, self._pages[index][0].shape[2] - offset)
            yield index, offset, count
            start += count

    def cotangents(self, length: int) -> list[Any]:
        """Views of whole buffers, in the pages' layout."""
        return [
            None
            if self.cotangent_dtype is None
            else self.piece(*(x[:, :, :count] for x in self._cotangents_of_page(index)))
            for index, _, count in self._parts(0, self._here(length))
        ]

    def cotangents_of(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """[B, K, T, H] each, put together from all pages they lie in."""
        parts = [
            [x[:, :, offset : offset + count] for x in self._cotangents_of_page(index)]
            for index, offset, count in self._parts(self._here(start), self._here(stop))
        ]
        return tuple(torch.cat(field, dim=2) for field in zip(*parts, strict=True))

    def _cotangents_of_page(self, index: int) -> tuple[Tensor, ...]:
        assert self.cotangent_dtype is not None
        if index not in self._cotangents:
            fields = self._pages[index][: self.differentiable]
            self._cotangents[index] = tuple(zeros_for(x, self.cotangent_dtype) for x in fields)
        return self._cotangents[index]

    def drop_cotangents(self, start: int = 0) -> None:
        """Pages of which any token lies before ``start`` stay."""
        first = self._here(start)
        for index in [i for i in self._cotangents if i * self.page_tokens >= first]:
            del self._cotangents[index]

    def empty(self, capacity: int) -> TokenPages:
        return type(self)(capacity, self.page_tokens)

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(x) for page in self._pages for x in page)

    @property
    def cotangent_nbytes(self) -> int:
        return sum(bytes_of(x) for page in self._cotangents.values() for x in page)


class KVPages(TokenPages):
    """Keys (after norm and RoPE) and values of an attention layer, [B, K, S, H] each."""

    kind = "attention"
    piece = Page
    differentiable = 2
