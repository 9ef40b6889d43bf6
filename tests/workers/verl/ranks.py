"""Spawned gloo ranks on which verl's engines run as its workers would run them on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import ranks

__all__ = ["run_ranks"]


def _with_verl_on_cpu(fn: Callable[..., Any], kwargs: dict[str, Any], rank: int) -> Any:
    # VERL_ENGINE_DEVICE lets verl's own engine, registered for cuda alone, run too.
    os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
    return fn(rank, dist.get_world_size(), **kwargs)


def run_ranks(fn: Callable[..., Any], world: int, out: Path, **kwargs: Any) -> list[Any]:
    """Results of ``fn(rank, world, **kwargs)``, rank by rank; fails if any rank does."""
    out.mkdir(parents=True, exist_ok=True)
    return ranks.run_ranks(partial(_with_verl_on_cpu, fn, kwargs), world, out, seconds=300)
