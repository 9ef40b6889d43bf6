"""The files of verl's checkpoints, one a rank: which are there, and what they hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

__all__ = ["read_shard", "read_shards", "saved_world_size"]

_FILE = re.compile(r"(\w+)_world_size_(\d+)_rank_(\d+)\.pt")


def _path(folder: Path, kind: str, world: int, rank: int) -> Path:
    return folder / f"{kind}_world_size_{world}_rank_{rank}.pt"


def saved_world_size(folder: Path, kinds: Collection[str], rank: int, world: int) -> int:
    """How many ranks saved what this one is to load.

    Args:
        kinds: of files: ``model``, ``optim``, ``extra_state``.
        rank, world: of the ranks that load. Where this rank's own files exist, no other is
            looked for: they may be on another node's disk.

    Raises:
        ValueError: there is no complete set of files, or several of other numbers of ranks.
    """
    if all(_path(folder, kind, world, rank).exists() for kind in kinds):
        return world
    found = [m for f in folder.iterdir() if (m := _FILE.fullmatch(f.name)) and m[1] in kinds]
    sizes = sorted({int(m[2]) for m in found})
    files = [_path(folder, k, size, r) for size in sizes for k in kinds for r in range(size)]
    for file in files:
        if not file.exists():
            raise ValueError(f"checkpoint: {file} is missing; restore it, or resume another step")
    if len(sizes) != 1:
        sets = " and ".join(map(str, sizes)) or "no"
        raise ValueError(
            f"checkpoint: {folder} has shards of {sets} ranks, none of {world}; keep one set of "
            "model_, optim_ and extra_state_world_size_*_rank_*.pt"
        )
    return sizes[0]


def read_shard(folder: Path, kind: str, world: int, rank: int) -> Any:
    """What a rank saved, in mapped memory.

    Raises:
        ValueError: the file cannot be read.
    """
    file = _path(folder, kind, world, rank)
    try:
        with _no_warning_about_meshes():
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, OSError, EOFError, UnpicklingError) as error:
        raise ValueError(f"checkpoint: {file} is damaged ({error}); resume another step") from error


def read_shards(folder: Path, kind: str, world: int) -> list[Any]:
    """What all ranks saved; see :func:`read_shard`."""
    return [read_shard(folder, kind, world, rank) for rank in range(world)]


@contextmanager
def _no_warning_about_meshes() -> Iterator[None]:
    """The meshes of saved tensors have process groups that are gone; only their shapes matter."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
