"""A batch trained on several ranks, and on one: two steps of AdamW, each with a clip.

Two, because an error in a reduction can hide in the first: AdamW's first step is all but the sign
of the gradient. Every split must give the numbers of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from longstraw_backend.groups import Group
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import check_supported
from longstraw_backend.models.families import SUPPORTED, text_model_type
from longstraw_backend.oracle import Objective, Outcome
from longstraw_backend.parallel import Layout, Lockstep
from longstraw_backend.parallel.finalize import clip_gradients
from longstraw_backend.parallel.layout import expert_ranks
from longstraw_backend.parallel.sharding import shard
from longstraw_backend.tiny import options_of
from longstraw_backend.walk import GroupWalk

from .comparison import versions, walk_config
from .distances import Distance, bitwise_equal, distance, gradient_rel_l2
from .inputs import add_adapters, base_model, batch
from .settings import BARS, DELTA_NET_GRADIENT_BAR, Settings
from .sides import driven, replay_batch, score_batch, walk_of

__all__ = ["Split", "Trained", "compare_split", "measure", "resolved", "train"]

SPLIT_BARS = {"float64": 1e-10, "float32": 1e-6}
"""Largest relative L2 of gradients and parameters; log-probs have the bars of any comparison."""

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


@dataclass(frozen=True)
class Split:
    """How far a split run is from that on one rank.

    Attributes:
        settings: with ``ep`` as it was.
        apart: rows, loss and gradients of the first step.
        norm_rel: largest relative difference of a step's gradient norm.
        parameter_rel_l2: of the trainable parameters after the last step.
        update_rel_l2: of their change since the first.
        score_replay_bitwise: on every rank, and ranks that share a prompt agree in every bit.
        state_bytes: by rank.
        one_rank_state_bytes: of the run on one rank.
        float32_error: of both runs from that on one rank in float32; bfloat16 only.
        delta_net: the model has gated-delta-net layers.
    """

    settings: Settings
    apart: Distance
    norm_rel: float
    parameter_rel_l2: float
    update_rel_l2: float
    score_replay_bitwise: bool
    state_bytes: list[int]
    one_rank_state_bytes: int
    float32_error: dict[str, Distance] | None
    delta_net: bool

    @property
    def numbers(self) -> dict[str, float]:
        """All distances by name."""
        found = asdict(self.apart) | {
            "norm_rel": self.norm_rel,
            "parameter_rel_l2": self.parameter_rel_l2,
            "update_rel_l2": self.update_rel_l2,
        }
        errors = asdict(self.float32_error["ranks"]) if self.float32_error else {}
        return found | {f"float32_error.{name}": value for name, value in errors.items()}

    @property
    def bars(self) -> dict[str, float]:
        """Largest allowed value by number."""
        if self.float32_error is not None:
            one = asdict(self.float32_error["one"])
            return {f"float32_error.{n}": 2 * one[n] for n in ("logprob_rms", "grad_rel_l2")}
        dtype = self.settings.dtype
        wide = max(SPLIT_BARS[dtype], DELTA_NET_GRADIENT_BAR if self.delta_net else 0.0)
        return {"logprob_max_abs": BARS[dtype], "grad_rel_l2": wide, "parameter_rel_l2": wide}

    @property
    def within_bars(self) -> bool:
        """Whether everything that has a bar is under it."""
        return self.score_replay_bitwise and all(self.numbers[k] <= v for k, v in self.bars.items())

    def as_json(self) -> dict[str, Any]:
        """All numbers, with settings and versions."""
        return self.numbers | {
            "score_replay_bitwise": self.score_replay_bitwise,
            "state_bytes": self.state_bytes,
            "one_rank_state_bytes": self.one_rank_state_bytes,
            "bars": self.bars,
            "within_bars": self.within_bars,
            "settings": asdict(self.settings),
            "versions": versions(),
        }


def resolved(settings: Settings) -> Settings:
    """With ``ep`` chosen; needs no rank and loads no weights.

    Raises:
        ValueError: the model is not supported, or its experts can't be shared out so.
    """
    config = _text_config(settings)
    check_supported(config)
    try:
        return replace(settings, ep=expert_ranks(config, settings.cp, settings.ep))
    except ValueError as error:
        raise ValueError(str(error).replace("expert_parallel_size", "--ep")) from error


def _text_config(settings: Settings) -> Any:
    if settings.family is None:
        try:
            return AutoConfig.from_pretrained(settings.model).get_text_config()
        except OSError as error:
            raise ValueError(f"--model: can't load {settings.model!r}: {error}") from error
    if settings.family not in SUPPORTED:
        raise ValueError(
            f"--family: expected one of {', '.join(SUPPORTED)}, got {settings.family!r}"
        )
    return AutoConfig.for_model(text_model_type(settings.family), **options_of(settings.family))


def compare_split(settings: Settings) -> Split | None:
    """Train on the first rank alone, then on all; on every rank of the default group.

    Args:
        settings: as :func:`resolved` returns them.

    Returns:
        The first rank's findings; None on others.
    """
    groups, objective = batch(settings, _text_config(settings).vocab_size)
    layout = Layout.of(settings.device, settings.cp, settings.ep or 1)
    one = truth = None
    if dist.get_rank() == 0:
        one = train(settings, groups, objective)
        if settings.dtype == "bfloat16":
            truth = train(replace(settings, dtype="float32"), groups, objective).first
    return measure(settings, one, train(settings, groups, objective, layout), truth)


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


def measure(
    settings: Settings, one: Trained | None, found: Trained, truth: Outcome | None = None
) -> Split | None:
    """Collect what all ranks found and compare it with ``one``, the first rank's. Collective.

    Args:
        truth: the first step of one rank in float32.
    """
    rows = {i: LogProbs(*(x.cpu() for x in row)) for i, row in found.first.rows.items()}
    shares: list[Any] = [None] * settings.ranks
    own = rows, found.first.loss, found.bitwise, found.state_bytes
    dist.all_gather_object(shares, own)
    if one is None:
        return None
    everything: dict[int, LogProbs] = {}
    for share in shares[:: settings.cp]:
        everything |= share[0]
    alike = all(bitwise_equal(s[0], {i: everything[i] for i in s[0]}) for s in shares)
    loss = sum(share[1] for share in shares[:: settings.cp])
    split = Outcome(loss, everything, found.first.gradients)
    errors = None
    if truth is not None:
        errors = {"one": distance(one.first, truth), "ranks": distance(split, truth)}
    return Split(
        settings,
        distance(split, one.first),
        max(abs(a - b) / b for a, b in zip(found.norms, one.norms, strict=True)),
        gradient_rel_l2(found.parameters, one.parameters),
        gradient_rel_l2(_update(found), _update(one)),
        alike and all(share[2] for share in shares),
        [share[3] for share in shares],
        one.state_bytes,
        errors,
        "linear_attention" in (getattr(_text_config(settings), "layer_types", None) or ()),
    )


def _update(run: Trained) -> Mapping[str, Tensor]:
    return {name: p - run.start[name] for name, p in run.parameters.items()}
