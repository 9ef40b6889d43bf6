"""A batch trained on several ranks, and on one: every split must give the numbers of one rank.

Two steps, because an error in a reduction can hide in the first: AdamW's first step is all but the
sign of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import check_supported
from longstraw_backend.models.families import SUPPORTED, text_model_type
from longstraw_backend.oracle import Outcome
from longstraw_backend.parallel import Layout
from longstraw_backend.parallel.layout import expert_ranks
from longstraw_backend.tiny import options_of

from .comparison import versions
from .distances import Distance, bitwise_equal, distance, gradient_rel_l2
from .inputs import batch
from .settings import BARS, DELTA_NET_GRADIENT_BAR, Settings
from .two_steps import Trained, train

__all__ = ["Split", "compare_split", "measure", "resolved"]

GRADIENT_BARS = {"float64": 1e-10, "float32": 1e-5}
PARAMETER_BARS = {"float64": 1e-10, "float32": 1e-6}
"""Largest relative L2. Log-probs, and gradients in float32, have the bars of any comparison: two
runs on one rank in other blocks are as far apart there, 1e-6."""


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
        dtype, least = self.settings.dtype, DELTA_NET_GRADIENT_BAR if self.delta_net else 0.0
        return {
            "logprob_max_abs": BARS[dtype],
            "grad_rel_l2": max(least, GRADIENT_BARS[dtype]),
            "parameter_rel_l2": max(least, PARAMETER_BARS[dtype]),
        }

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
