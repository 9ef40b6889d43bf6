"""The peak of CPU tensors, from the allocation events of torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["cpu_peak_bytes", "muted"]


class _Recorder(torch.autograd.profiler.profile):
    """torch's profiler without its Python statistics, which take longer than what is recorded."""

    def _parse_kineto_results(self, *_: Any) -> list[Any]:
        return []


def cpu_peak_bytes(work: Callable[[], Any]) -> int:
    """Bytes of tensors on the CPU at most while ``work`` runs, above what there was before; what a
    maths library keeps for itself is not seen. Slower than ``work`` alone."""
    recorder: Any = _Recorder(use_kineto=True, profile_memory=True)
    with muted():
        recorder.__enter__()
    try:
        work()
    finally:
        with muted():
            recorder.__exit__(None, None, None)
    held = peak = 0
    for event in recorder.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@contextmanager
def muted() -> Iterator[None]:
    """The profiler announces its start and stop on file descriptor 2, and nothing turns it off."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
