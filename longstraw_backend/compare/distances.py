"""How far two outcomes are apart. All sums in float64, one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import Outcome

__all__ = [
    "Distance",
    "bitwise_equal",
    "distance",
    "gradient_cosine",
    "gradient_rel_l2",
    "log_prob_errors",
]


@dataclass(frozen=True)
class Distance:
    """Of one outcome from another, the reference.

    Attributes:
        logprob_max_abs: largest difference of a log-prob, nats.
        logprob_rms: root of the mean square of these differences, nats.
        loss_rel: difference of the losses over the reference's.
        grad_rel_l2: norm of the gradients' difference over the reference's norm, all parameters.
        grad_cosine: between the gradients.
    """

    logprob_max_abs: float
    logprob_rms: float
    loss_rel: float
    grad_rel_l2: float
    grad_cosine: float


def distance(ours: Outcome, reference: Outcome) -> Distance:
    """How far ``ours`` is from ``reference``; both ran the same rows and name parameters alike."""
    errors = log_prob_errors(ours.rows, reference.rows)
    return Distance(
        logprob_max_abs=float(errors.abs().max()) if errors.numel() else 0.0,
        logprob_rms=float(errors.square().mean().sqrt()) if errors.numel() else 0.0,
        loss_rel=_ratio(abs(ours.loss - reference.loss), abs(reference.loss)),
        grad_rel_l2=gradient_rel_l2(ours.gradients, reference.gradients),
        grad_cosine=gradient_cosine(ours.gradients, reference.gradients),
    )


def log_prob_errors(ours: Mapping[int, LogProbs], reference: Mapping[int, LogProbs]) -> Tensor:
    """Differences of all rows' log-probs side by side, [sum of R_i] float64 on the CPU.

    Raises:
        ValueError: the rows are not the same.
    """
    if ours.keys() != reference.keys():
        raise ValueError(f"rows: expected {sorted(reference)}, got {sorted(ours)}")
    rows = [_wide(ours[i].log_probs) - _wide(reference[i].log_probs) for i in sorted(ours)]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)


def gradient_rel_l2(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """|a - b| / |b| over all parameters; a parameter without a gradient counts as zero."""
    return _ratio(_products(ours, reference)[3] ** 0.5, _products(ours, reference)[2] ** 0.5)


def gradient_cosine(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """a . b / (|a| |b|) over all parameters; 1 if both are zero."""
    both, own, other, _ = _products(ours, reference)
    return 1.0 if own == other == 0 else _ratio(both, (own * other) ** 0.5)


def bitwise_equal(ours: Mapping[int, LogProbs], others: Mapping[int, LogProbs]) -> bool:
    """Whether log-probs and entropies of all rows are the same bits."""
    return ours.keys() == others.keys() and all(
        torch.equal(a, b) for i in ours for a, b in zip(ours[i], others[i], strict=True)
    )


def _wide(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def _products(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> tuple[float, float, float, float]:
    """a . b, a . a, b . b and |a - b| ** 2."""
    sums = [0.0] * 4
    for name in ours.keys() | reference.keys():
        a, b = ours.get(name), reference.get(name)
        present = a if a is not None else b
        assert present is not None
        zero = torch.zeros_like(present)
        x, y = (_wide(zero if t is None else t) for t in (a, b))
        for i, value in enumerate(((x * y), (x * x), (y * y), (x - y).square())):
            sums[i] += float(value.sum())
    return sums[0], sums[1], sums[2], sums[3]


def _ratio(value: float, scale: float) -> float:
    if scale:
        return value / scale
    return 0.0 if value == 0 else float("inf")
