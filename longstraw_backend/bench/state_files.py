"""A captured state on disk, added to while the capture goes on.

Each save writes what is new since the one before, tokens [start, stop) of every layer and the
recurrent states at its boundaries, to ``state-START-STOP.safetensors``: what is visible is never
written to again. Loading lays the files' contents into an empty segment of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longstraw_backend.state import Segment, TokenPages
from longstraw_backend.walk.advance import spans

__all__ = ["load_state", "save_state", "state_files"]


def state_files(folder: Path) -> list[Path]:
    """Those in a folder, in order."""
    return sorted(folder.glob("state-*.safetensors"))


def save_state(segment: Segment, folder: Path, chunk: int) -> int:
    """Save what is not saved yet; returns the bytes written.

    Args:
        chunk: tokens of a block, whose boundaries a tracked segment needs.
    """
    start = max((_stop_of(file) for file in state_files(folder)), default=0)
    stop = segment.length
    if stop == start:
        return 0
    tensors: dict[str, Tensor] = {}
    boundaries = _boundaries(segment, start, stop, chunk)
    for number, layer in enumerate(segment.layers):
        if isinstance(layer, TokenPages):
            tensors |= _named(f"{number}", _tokens_of(layer.visible(stop), start, stop))
            continue
        for boundary in boundaries:
            tensors |= _named(f"{number}@{boundary}", layer.visible(boundary)[-1])
    path = folder / f"state-{start:012d}-{stop:012d}.safetensors"
    half = path.with_suffix(".half")
    save_file(tensors, half)
    half.rename(path)
    return sum(x.nbytes for x in tensors.values())


def load_state(segment: Segment, folder: Path, chunk: int, device: torch.device) -> None:
    """Fill an empty segment with all that was saved, by way of the device that computes."""
    for file in state_files(folder):
        start, stop = segment.length, _stop_of(file)
        tensors = load_file(file)
        for end in _boundaries(segment, start, stop, chunk):
            part = slice(segment.length - start, end - start)
            for number, layer in enumerate(segment.layers):
                tokens = isinstance(layer, TokenPages)
                values = _values(tensors, f"{number}" if tokens else f"{number}@{end}")
                cut = [(x[:, :, part] if tokens else x).to(device) for x in values]
                layer.write(segment.length, *cut)
            segment.commit(end - segment.length)


def _boundaries(segment: Segment, start: int, stop: int, chunk: int) -> list[int]:
    """Where a tracked segment has recurrent states after ``start``; of others only the last."""
    if not segment.tracked:
        return [stop]
    return [start + part.stop for part in spans(stop - start, chunk)]


def _stop_of(file: Path) -> int:
    return int(file.stem.split("-")[2])


def _tokens_of(pages: Sequence[Any], start: int, stop: int) -> list[Tensor]:
    """Tokens [start, stop) of each field of the pages, in CPU memory."""
    parts, first = [], 0
    for page in pages:
        size = page[0].shape[2]
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            parts.append([x[:, :, low:high].cpu() for x in page if x is not None])
        first += size
    return [torch.cat(field, dim=2) for field in zip(*parts, strict=True)]


def _named(prefix: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{i}": x.cpu().contiguous() for i, x in enumerate(values)}


def _values(tensors: dict[str, Tensor], prefix: str) -> list[Tensor]:
    names = sorted(name for name in tensors if name.rsplit(".", 1)[0] == prefix)
    return [tensors[name] for name in names]
