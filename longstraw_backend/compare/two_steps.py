"""Two steps of AdamW on a batch, each with a clip, on one rank or on several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstraw_backend.groups import Group
from longstraw_backend.oracle import Objective, Outcome
from longstraw_backend.parallel import Layout, Lockstep
from longstraw_backend.parallel.finalize import clip_gradients
from longstraw_backend.parallel.sharding import shard
from longstraw_backend.walk import GroupWalk

from .comparison import walk_config
from .distances import bitwise_equal
from .inputs import add_adapters, base_model
from .settings import Settings
from .sides import driven, replay_batch, score_batch, walk_of

__all__ = ["Trained", "train"]

_STEPS, _LEARNING_RATE, _MAX_NORM = 2, 1e-3, 0.01


@dataclass(frozen=True)
class Trained:
    """What one run gave: of all rows on one rank, of a rank's own rows in a split.

    Attributes:
        first: the first step's outcome, with gradients before the clip.
        norms: of the gradients, a step each.
        start: trainable parameters before the first step.
        parameters: after the last.
        bitwise: score and replay gave the same bits in every step.
        state_bytes: of the prompt states this rank held.
    """

    first: Outcome
    norms: list[float]
    start: dict[str, Tensor]
    parameters: dict[str, Tensor]
    bitwise: bool
    state_bytes: int


def train(
    settings: Settings,
    groups: Sequence[Group],
    objective: Objective,
    layout: Layout | None = None,
) -> Trained:
    """Two steps on a batch: alone, or with all ranks of a layout, which each get the whole batch.

    Returns:
        Tensors on the CPU, whole ones on the first rank and none on others.
    """
    walk, lockstep = _walk(settings), Lockstep()
    if layout is not None:
        module, lockstep = shard(walk.model.module, layout), Lockstep(dist.group.WORLD)
        walk = replace(walk, model=replace(walk.model, module=module, ranks=layout.ranks))
        groups = groups[layout.data_rank :: layout.data_size]
    named = [(n, p) for n, p in walk.model.module.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=_LEARNING_RATE, foreach=False)
    start, steps, state_bytes = _whole(named), [], 0
    for _ in range(_STEPS):
        steps.append(_step(walk, groups, objective, lockstep))
        optimizer.step()
        optimizer.zero_grad()
        state_bytes = walk.store.nbytes
        walk.store.clear()
    first, norms, bitwise = steps[0][0], [s[1] for s in steps], all(s[2] for s in steps)
    return Trained(first, norms, start, _whole(named), bitwise, state_bytes)


def _walk(settings: Settings) -> GroupWalk:
    model = base_model(settings)
    if settings.lora:
        experts = settings.ep in (None, 1)  # their adapters add to whole tensors of experts
        model = add_adapters(model, settings.lora, settings.seed, experts=experts)
    return walk_of(driven(model), walk_config(settings, settings.gradient))


def _step(
    walk: GroupWalk, groups: Sequence[Group], objective: Objective, lockstep: Lockstep
) -> tuple[Outcome, float, bool]:
    """Outcome, norm of the gradients, which are clipped by it, and if score and replay agree."""
    scored = score_batch(walk, groups, objective, lockstep)
    found = replay_batch(walk, groups, objective, lockstep=lockstep)
    found = replace(found, gradients=_whole(found.gradients.items()))
    norm = clip_gradients(walk.model.module.parameters(), _MAX_NORM)
    return found, float(norm), bitwise_equal(scored, found.rows)


@torch.no_grad()
def _whole(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of whole tensors on the first rank's CPU. Collective if they are sharded."""
    keep, found = not dist.is_initialized() or dist.get_rank() == 0, {}
    for name, tensor in named:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = full.to("cpu", copy=True)
    return found
