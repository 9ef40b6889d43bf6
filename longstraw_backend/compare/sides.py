"""Both sides of a comparison, each measured alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from longstraw_backend.allocations import cpu_peak_bytes
from longstraw_backend.config import LongStrawConfig
from longstraw_backend.groups import Group, Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel, drive
from longstraw_backend.oracle import Mode, Objective, Outcome, gradients_of, ordinary_training
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey, PromptStore
from longstraw_backend.walk import BatchRun, GroupWalk, Meter

__all__ = ["Measured", "driven", "measured", "ordinary", "replay_batch", "score_batch", "walk_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Measured(Generic[T]):
    """A result, the wall time of the run that gave it, and its tensor bytes at the peak."""

    result: T
    seconds: float
    peak_bytes: int


def measured(work: Callable[[], T], device: torch.device) -> Measured[T]:
    """Run ``work`` twice: a warm-up, on a CPU watched by the profiler, and the run that is timed.

    Peak bytes are those of the watched run on a CPU and of the timed run on CUDA.
    """
    if device.type != "cuda":
        peak = cpu_peak_bytes(work)
        began = time.perf_counter()
        result = work()
        return Measured(result, time.perf_counter() - began, peak)
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, began = torch.cuda.memory_allocated(device), time.perf_counter()
    result = work()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return Measured(result, seconds, torch.cuda.max_memory_allocated(device) - before)


def ordinary(
    model: nn.Module, groups: Sequence[Group], objective: Objective, mode: Mode
) -> Measured[Outcome]:
    """Ordinary training of an undriven model: forward and backward of every row."""

    def work() -> Outcome:
        model.zero_grad(set_to_none=True)
        return ordinary_training(model, groups, objective, mode=mode)

    side = measured(work, next(model.parameters()).device)
    model.zero_grad(set_to_none=True)
    return side


def driven(model: nn.Module) -> DrivenModel:
    """Drive a stock model, or the one inside a peft wrapper. It can't run ordinarily afterwards."""
    inner: Any = model
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else model
    return replace(drive(base), module=model)


def walk_of(model: DrivenModel, config: LongStrawConfig) -> GroupWalk:
    """A walk that keeps every prompt state until it is cleared."""
    return GroupWalk(model, config, PromptStore(1 << 62, 1 << 62))


def _key(group: Group) -> PromptKey:
    return PromptKey(group.digest, 0)


def replay_batch(
    walk: GroupWalk,
    groups: Sequence[Group],
    objective: Objective,
    meter: Meter | None = None,
    lockstep: Lockstep | None = None,
) -> Outcome:
    """Capture what is not captured yet, then replay every row with its backward.

    Rows and loss are those of ``groups``, this rank's part of the batch. Gradients are added to
    those the parameters already have.
    """
    total, rows = [0.0], {}

    def on_row(row: Row, out: LogProbs) -> None:
        loss = objective.loss(row, out)
        if loss.requires_grad:
            loss.backward()
        total[0] += loss.item()
        rows[row.index] = LogProbs(out.log_probs.detach(), out.entropy.detach())

    _batch_run(walk, objective, on_row, meter, lockstep, grad=True).run(groups)
    return Outcome(total[0], rows, gradients_of(walk.model.module))


def score_batch(
    walk: GroupWalk,
    groups: Sequence[Group],
    objective: Objective,
    lockstep: Lockstep | None = None,
) -> dict[int, LogProbs]:
    """Score every row, by ``Row.index``; captures what is not captured yet."""
    rows: dict[int, LogProbs] = {}

    def on_row(row: Row, out: LogProbs) -> None:
        rows[row.index] = out

    _batch_run(walk, objective, on_row, None, lockstep, grad=False).run(groups)
    return rows


def _batch_run(
    walk: GroupWalk,
    objective: Objective,
    on_row: Callable[[Row, LogProbs], None],
    meter: Meter | None,
    lockstep: Lockstep | None,
    *,
    grad: bool,
) -> BatchRun:
    return BatchRun(
        walk,
        meter or Meter(),
        lockstep or Lockstep(),
        key=_key,
        temperature=lambda row: objective.temperatures[row.index],
        on_row=on_row,
        entropy=objective.entropy_coeff != 0,
        grad=grad,
    )
