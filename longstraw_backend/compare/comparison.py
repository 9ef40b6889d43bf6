"""Run both sides and put their numbers side by side."""

from __future__ import annotations

import copy
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

import longstraw_backend
from longstraw_backend.config import Gradient, LongStrawConfig
from longstraw_backend.groups import Group
from longstraw_backend.models import DrivenModel
from longstraw_backend.oracle import Mode, Objective, Outcome, ordinary_training
from longstraw_backend.walk import GroupWalk, Meter

from .distances import (
    Distance,
    bitwise_equal,
    distance,
    gradient_cosine,
    gradient_rel_l2,
)
from .inputs import add_adapters, base_model, batch, turn_tokens
from .settings import BARS, DELTA_NET_GRADIENT_BAR, Settings
from .sides import Measured, driven, measured, ordinary, replay_batch, score_batch, walk_of

__all__ = ["Comparison", "compare", "versions", "walk_config"]


@dataclass(frozen=True)
class Comparison:
    """What was measured.

    Attributes:
        apart: our outcome from the reference's.
        score_replay_bitwise: log-probs and entropies of score and of replay are the same bits.
        seconds: of capture and replay, and of ordinary training; scoring is in neither.
        peak_bytes: tensor bytes at the peak above what was allocated before, per side.
        phases: our seconds of capture and of replay.
        float32_error: per side, its distance from the same training in float32; bfloat16 only.
        exact_vs_response_only: how far our gradient of full-sequence training is from the one with
            the prompt state held constant, relative to the former: relative L2 and cosine.
        tokens: of our side: captured, then run forward and backward; and of its rows one by one.
        delta_net: the model has gated-delta-net layers.
    """

    settings: Settings
    apart: Distance
    score_replay_bitwise: bool
    seconds: dict[str, float]
    peak_bytes: dict[str, int]
    phases: dict[str, float]
    float32_error: dict[str, Distance] | None
    exact_vs_response_only: dict[str, float]
    tokens: dict[str, int]
    delta_net: bool = False

    @property
    def bars(self) -> dict[str, float]:
        """Largest allowed value by number; the gradient's only if both sides mean the same one."""
        names = ["logprob_max_abs", *(["grad_rel_l2"] if self.settings.gradient_is_ours else [])]
        if self.float32_error is None:
            bars = dict.fromkeys(names, BARS[self.settings.dtype])
            if self.delta_net and "grad_rel_l2" in bars:
                bars["grad_rel_l2"] = max(bars["grad_rel_l2"], DELTA_NET_GRADIENT_BAR)
            return bars
        stock = asdict(self.float32_error["reference"])
        return {f"float32_error.{_BF16[name]}": 2 * stock[_BF16[name]] for name in names}

    @property
    def within_bars(self) -> bool:
        """Whether everything that has a bar is under it."""
        numbers = asdict(self.apart)
        if self.float32_error is not None:
            ours = asdict(self.float32_error["longstraw"])
            numbers = {f"float32_error.{name}": value for name, value in ours.items()}
        return self.score_replay_bitwise and all(numbers[k] <= v for k, v in self.bars.items())

    def as_json(self) -> dict[str, Any]:
        """All numbers, with settings and versions."""
        errors = {k: asdict(v) for k, v in (self.float32_error or {}).items()}
        return asdict(self.apart) | {
            "score_replay_bitwise": self.score_replay_bitwise,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "phases": self.phases,
            "float32_error": errors or None,
            "exact_vs_response_only": self.exact_vs_response_only,
            "tokens": self.tokens,
            "bars": self.bars,
            "within_bars": self.within_bars,
            "settings": asdict(self.settings),
            "versions": versions(),
        }


_BF16 = {"logprob_max_abs": "logprob_rms", "grad_rel_l2": "grad_rel_l2"}
"""What is judged in bfloat16: the largest of a few hundred rounding errors is a matter of luck."""


def compare(settings: Settings) -> Comparison:
    """Run the ordinary side, then ours, on one model and one batch.

    Raises:
        ValueError: the model, the device or a package that the settings ask for is not there.
    """
    model = base_model(settings)
    if settings.lora:
        model = add_adapters(model, settings.lora, settings.seed)
    config: Any = model.config
    groups, objective = batch(settings, config.vocab_size)
    truth = _float32_truth(settings, model, groups, objective)
    theirs = _reference(settings, model, groups, objective)
    walk, meter = walk_of(driven(model), walk_config(settings, settings.gradient)), Meter()
    ours = _longstraw(walk, groups, objective, meter)
    scored = score_batch(walk, groups, objective)
    errors = None
    if truth is not None:
        both = {"longstraw": ours.result, "reference": theirs.result}
        errors = {side: distance(outcome, truth) for side, outcome in both.items()}
    return Comparison(
        settings,
        distance(ours.result, theirs.result),
        bitwise_equal(scored, ours.result.rows),
        {"longstraw": ours.seconds, "reference": theirs.seconds},
        {"longstraw": ours.peak_bytes, "reference": theirs.peak_bytes},
        dict(meter.seconds),
        errors,
        _gap(settings, walk.model, groups, objective, ours.result),
        _tokens(meter),
        "linear_attention" in (getattr(config, "layer_types", None) or ()),
    )


def _mode(settings: Settings) -> Mode:
    return "detached" if settings.against == "detached" else "full"


def _float32_truth(
    settings: Settings, model: nn.Module, groups: list[Group], objective: Objective
) -> Outcome | None:
    if settings.dtype != "bfloat16":
        return None
    return ordinary_training(copy.deepcopy(model).float(), groups, objective, mode=_mode(settings))


def _reference(
    settings: Settings, model: nn.Module, groups: list[Group], objective: Objective
) -> Measured[Outcome]:
    if settings.against == "verl-fsdp2":
        from .verl_fsdp2 import verl_training

        return verl_training(settings, model, groups, objective)
    return ordinary(model, groups, objective, _mode(settings))


def walk_config(settings: Settings, gradient: Gradient) -> LongStrawConfig:
    """Of our side."""
    return LongStrawConfig(
        gradient=gradient,
        chunk_tokens=settings.chunk,
        response_block=settings.response_block,
        replay_tokens=settings.replay_tokens or None,
        shared_tokens=max(1, turn_tokens(settings) // 2) if settings.turns > 1 else 256,
        context_parallel_size=settings.cp,
        progress=False,
    )


def _longstraw(
    walk: GroupWalk, groups: list[Group], objective: Objective, meter: Meter
) -> Measured[Outcome]:
    def work() -> Outcome:
        walk.model.module.zero_grad(set_to_none=True)
        walk.store.clear()
        meter.reset()
        return replay_batch(walk, groups, objective, meter)

    return measured(work, walk.model.device)


def _gap(
    settings: Settings,
    model: DrivenModel,
    groups: list[Group],
    objective: Objective,
    ours: Outcome,
) -> dict[str, float]:
    """From one more replay of the batch, for the gradient that was not asked for."""
    other: Gradient = "exact" if settings.gradient == "response_only" else "response_only"
    model.module.zero_grad(set_to_none=True)
    found = replay_batch(walk_of(model, walk_config(settings, other)), groups, objective)
    exact, responses = (ours, found) if other == "response_only" else (found, ours)
    return {
        "rel_l2": gradient_rel_l2(responses.gradients, exact.gradients),
        "cosine": gradient_cosine(responses.gradients, exact.gradients),
    }


def _tokens(meter: Meter) -> dict[str, int]:
    return {
        "captured": meter.prompt_tokens_captured,
        "forward": meter.forward_tokens,
        "backward": meter.backward_tokens,
        "full_sequences": meter.full_sequence_tokens,
    }


def versions() -> dict[str, str]:
    """Of what numbers depend on."""
    found = {
        "longstraw_backend": longstraw_backend.__version__,
        "python": platform.python_version(),
    }
    for package in ("torch", "transformers", "peft", "verl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
