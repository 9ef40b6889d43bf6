"""Run a function on spawned gloo ranks, as verl's workers would run it on a CPU."""

from __future__ import annotations

import os
import socket
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


def _rank(rank: int, world: int, port: int, out: str, fn: Callable[..., Any], kwargs: Any) -> None:
    torch.set_num_threads(1)
    # VERL_ENGINE_DEVICE lets verl's own engine, registered for cuda alone, run too.
    os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.save(fn(rank, world, **kwargs), Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world: int, out: Path, **kwargs: Any) -> list[Any]:
    """Results of ``fn(rank, world, **kwargs)``, rank by rank; fails if any rank does."""
    out.mkdir(parents=True, exist_ok=True)
    context = mp.spawn(
        _rank, args=(world, _free_port(), str(out), fn, kwargs), nprocs=world, join=False
    )
    for _ in range(60):
        if context.join(timeout=5):
            break
    else:
        for process in context.processes:
            process.kill()
        raise TimeoutError(f"{world} ranks did not finish within 300 s")
    return [torch.load(out / f"{r}.pt", weights_only=False) for r in range(world)]
