"""Ranks of a comparison: processes started here, or those that torchrun has started."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from .settings import Device

__all__ = ["is_first", "on_ranks"]

T = TypeVar("T")

_HOST = "127.0.0.1"
_PATIENCE = timedelta(hours=2)  # other ranks wait while the first runs alone
_BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "nccl"}


def on_ranks(work: Callable[..., T], world: int, device: Device, *args: Any) -> T:
    """What ``work(*args)`` returns on the first of ``world`` ranks of a default process group.

    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) this process is one of them.

    Args:
        work: a function of a module; runs on every rank. Its result is pickled.
        device: where it computes: ranks talk over gloo or NCCL, with a GPU each.

    Raises:
        ValueError: torchrun has started another number of ranks, there are too few GPUs, or
            ``work`` raised it on all ranks.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _joined(work, world, device, *args)
    if device == "cuda" and torch.cuda.device_count() < world:
        raise ValueError(
            f"--device: {world} ranks need a GPU each, torch finds {torch.cuda.device_count()}; "
            "lower --cp or --dp, or use --device cpu"
        )
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="longstraw-ranks-") as name:
        folder = Path(name)
        try:
            spawn(_rank, (world, store.port, device, folder, work, args), nprocs=world)
        except ProcessRaisedException as error:
            said = folder / f"{error.error_index}"
            if said.exists():
                raise pickle.loads(said.read_bytes()) from error
            raise
        found: T = pickle.loads((folder / "found").read_bytes())
    return found


def is_first() -> bool:
    """Whether this process is the first rank of several, or alone."""
    return os.environ.get("RANK", "0") == "0"


def _joined(work: Callable[..., T], world: int, device: Device, *args: Any) -> T:
    started = int(os.environ["WORLD_SIZE"])
    if started != world:
        raise ValueError(
            f"--cp, --dp: expected {started} ranks in all, as torchrun started, got {world}; "
            f"start {world}, or change --cp or --dp"
        )
    with _process_group(device, int(os.environ.get("LOCAL_RANK", "0"))):
        found: list[Any] = [work(*args)]
        dist.broadcast_object_list(found)
    first: T = found[0]
    return first


def _rank(
    rank: int,
    world: int,
    port: int,
    device: Device,
    folder: Path,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    store = TCPStore(_HOST, port, is_master=False)
    with _process_group(device, rank, store=store, rank=rank, world_size=world):
        try:
            found = work(*args)
        except ValueError as error:
            (folder / f"{rank}").write_bytes(pickle.dumps(error))
            raise
        if rank == 0:
            (folder / "found").write_bytes(pickle.dumps(found))
        dist.barrier()


@contextmanager
def _process_group(device: Device, local: int, **options: Any) -> Iterator[None]:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of gathering experts
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if device == "cuda":
        torch.cuda.set_device(local)
        options["device_id"] = torch.device("cuda", local)
    dist.init_process_group(_BACKENDS[device], timeout=_PATIENCE, **options)
    yield
    dist.destroy_process_group()  # not after an error: others may be in a collective
