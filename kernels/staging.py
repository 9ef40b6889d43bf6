"""Bring state that rests in CPU memory to the device that a kernel runs on.

    segments   one page after another: while kernels run over page i, page i + 1 is copied by a side
               stream into the other of two rooms, whatever the number of pages
    layer      all pages before the first kernel, for kernels that read them in any order

What is on the device already passes as it is. What is copied keeps its strides, so that a kernel
takes the same path, and gives the same bits, as over memory of the device. Copies out of pinned
memory don't wait for the device; out of pageable memory they do. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from longstraw_backend.choices import STAGINGS, Staging

__all__ = [
    "STAGINGS",
    "Staging",
    "add_over",
    "contiguous_parts",
    "copy_over",
    "here",
    "reachable",
    "staged",
]


def reachable(x: Tensor, device: torch.device) -> bool:
    """Whether a kernel on ``device`` can have ``x``: it is there, or in CPU memory beside it."""
    return x.device == device or (x.device.type == "cpu" and device.type == "cuda")


def away(x: Tensor, device: torch.device) -> bool:
    """Whether ``x`` must be copied for a kernel on ``device``."""
    return x.device != device


def here(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``: itself, or a copy of its own, in order with the kernels."""
    if not away(x, device):
        return x
    room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    copy_over(room, x)
    return room


def staged(
    pages: Iterable[Sequence[Tensor]], device: torch.device, mode: Staging = "segments"
) -> Iterator[tuple[Tensor, ...]]:
    """Each page's tensors on ``device``, in order.

    Args:
        pages: tensors that are needed together, on ``device`` or in CPU memory; of any shape, but
            none expanded.
        mode: with ``segments`` a page is valid until the next one is asked for, and the stream that
            uses it must be the one that was current when the first was; with ``layer`` until the
            iterator goes.
    """
    if mode not in STAGINGS:
        raise ValueError(f"staging: expected one of {', '.join(STAGINGS)}, got {mode!r}")
    if mode == "segments":
        return _prefetched(pages, device)
    return iter([tuple(here(x, device) for x in page) for page in pages])


def copy_over(into: Tensor, x: Tensor) -> None:
    """Copy between the device and CPU memory without waiting, in order with the current stream.

    Before the CPU reads what was copied to it the device must be waited for.
    """
    if into.device == x.device:
        into.copy_(x)
        return
    for part, new in contiguous_parts(into, x):
        part.copy_(new, non_blocking=True)


def add_over(into: Tensor, x: Tensor) -> None:
    """Add ``x`` in place where ``into`` rests and in its dtype; waits if that is CPU memory."""
    into.add_(x.to(into.device, into.dtype))


def contiguous_parts(into: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of parts that a copy engine can move as they are: across devices torch would copy a
    strided tensor by way of pageable memory, and wait for it. A page cut short is strided."""
    if into.dim() <= 2 or (into.is_contiguous() and x.is_contiguous()):
        yield into, x
        return
    for part, new in zip(into, x, strict=True):
        yield from contiguous_parts(part, new)


class _Room:
    """Device memory that holds one page after another; it grows to the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: dict[int, Tensor] = {}

    def like(self, page: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Unwritten tensors with the shapes, strides and dtypes of a page's."""
        return tuple(self._like(i, x) for i, x in enumerate(page))

    def _like(self, field: int, x: Tensor) -> Tensor:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        size = (last + 1) * x.itemsize if x.numel() else 0
        if field not in self._bytes or self._bytes[field].numel() < size:
            self._bytes.pop(field, None)
            self._bytes[field] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes[field][:size].view(x.dtype).as_strided(x.shape, x.stride())


class _Lane:
    """Copies beside the kernels: on a side stream on CUDA, one after the other elsewhere.

    Rooms belong to the kernels' stream. The side stream waits for all kernels asked for so far
    before it writes to a room, and kernels wait for the copy before they read, so a room may be
    written again, or go, once whoever used it has asked the kernels' stream for all they need.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._kernels = torch.cuda.current_stream(device) if cuda else None
        self._copies = _copy_stream(device) if cuda else None

    def fill(self, room: tuple[Tensor, ...], page: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Copy a page; the event says when it has arrived, None that it has."""
        if self._copies is None or self._kernels is None:
            for into, x in zip(room, page, strict=True):
                copy_over(into, x)
            return None
        self._copies.wait_stream(self._kernels)
        with torch.cuda.stream(self._copies):
            for into, x in zip(room, page, strict=True):
                copy_over(into, x)
            arrival = torch.cuda.Event()
            arrival.record(self._copies)
        return arrival

    def await_arrival(self, arrival: torch.cuda.Event | None) -> None:
        """Let kernels asked for from now on see the page."""
        if arrival is not None and self._kernels is not None:
            self._kernels.wait_event(arrival)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_Fetched = tuple[tuple[Tensor, ...], torch.cuda.Event | None]


def _prefetched(
    pages: Iterable[Sequence[Tensor]], device: torch.device
) -> Generator[tuple[Tensor, ...], None, None]:
    lane, rooms = _Lane(device), [_Room(device), _Room(device)]

    def fetch(page: Sequence[Tensor]) -> _Fetched:
        if not any(away(x, device) for x in page):
            return tuple(page), None
        rooms.reverse()
        room = rooms[0].like(page)
        return room, lane.fill(room, page)

    ahead: list[_Fetched] = []
    try:
        for page in pages:
            ahead.append(fetch(page))
            if len(ahead) == 2:
                tensors, arrival = ahead.pop(0)
                lane.await_arrival(arrival)
                yield tensors
        for tensors, arrival in ahead:
            lane.await_arrival(arrival)
            yield tensors
    finally:
        for _, arrival in ahead:  # whoever stopped early gives rooms back that are being written
            lane.await_arrival(arrival)
