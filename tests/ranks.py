"""Run a function on several spawned ranks over gloo, with a bound on the time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run_ranks"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, world: int, port: int, folder: str, function: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.save(function(rank), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    function: Callable[[int], Any], world: int, folder: Path, seconds: float = 120
) -> list[Any]:
    """Results of ``function(rank)``, rank by rank.

    Args:
        function: a module-level function; ``torch.distributed`` is initialised when it runs.
        folder: empty; takes the results.
        seconds: after which the ranks are killed.
    """
    args = world, _free_port(), str(folder), function
    context = mp.spawn(_rank, args=args, nprocs=world, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{world} ranks did not finish within {seconds} s")
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
