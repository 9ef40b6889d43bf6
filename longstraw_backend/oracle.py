"""The other side of every comparison: ordinary autograd over prompt and response in one pass.

Nothing here knows segments, pages or walks. A stock Hugging Face model runs each row of a batch as
a conventional trainer does, and one of two gradients comes out:

    full        through the prompt as well: d/dtheta l(theta, z_P(theta))
    detached    z_P held constant: dl/dtheta |z_P; ``gradient: response_only`` must equal it exactly

The prompt boundary lies after token P - 2, as in a walk: what the first P - 1 tokens hand on is
detached in every layer, the last prompt token belongs to the response side. Attention layers hand
on keys and values; gated-delta-net layers are in ``oracle_delta_net.py``, latent attention is in
``oracle_latent.py``.

Legend: P prompt tokens, R response tokens, K key/value heads, S tokens, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from longstraw_backend.groups import Group, Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle_delta_net import gated_delta_nets
from longstraw_backend.oracle_latent import latent_attentions

__all__ = [
    "Mode",
    "Objective",
    "Outcome",
    "gradients_of",
    "ordinary_log_probs",
    "ordinary_training",
]

Mode = Literal["full", "detached"]


@dataclass(frozen=True)
class Objective:
    """What both sides train on: a policy-gradient loss with an entropy bonus.

        loss = - sum over rows and tokens of (w log p + entropy_coeff / N * H)

    with N the number of response tokens in the batch.

    Attributes:
        weights: per row of the batch, by ``Row.index``: one number per response token, [R_i].
        temperatures: per row of the batch.
        entropy_coeff: weight of the mean entropy.
    """

    weights: Sequence[Tensor]
    temperatures: Sequence[float]
    entropy_coeff: float = 0.0

    def loss(self, row: Row, out: LogProbs) -> Tensor:
        """One row's share; shares add up to the loss of the batch. Scalar, with ``out``'s graph."""
        tokens = max(1, sum(w.numel() for w in self.weights))
        weights = self.weights[row.index].to(out.log_probs)
        bonus = out.entropy.sum() * (self.entropy_coeff / tokens)
        return -(weights * out.log_probs).sum() - bonus


@dataclass(frozen=True)
class Outcome:
    """What a pass over a batch gives.

    Attributes:
        loss: of the whole batch.
        rows: log-probs and entropies by ``Row.index``, [R_i] each, without a graph.
        gradients: by parameter name. They are the parameters' own ``.grad``: call
            ``zero_grad(set_to_none=True)``, which leaves these alone, before the next pass.
    """

    loss: float
    rows: dict[int, LogProbs]
    gradients: dict[str, Tensor]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; parameters without one are left out."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


class _DetachedPrompt(DynamicCache):  # type: ignore[misc]
    """Keeps nothing; hands keys and values of a full pass back, the prompt's part detached."""

    def __init__(self, boundary: int) -> None:
        super().__init__()
        self.boundary = boundary

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._cut(k), self._cut(v)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def _cut(self, x_BKSH: Tensor) -> Tensor:
        before, after = x_BKSH[:, :, : self.boundary], x_BKSH[:, :, self.boundary :]
        return torch.cat([before.detach(), after], dim=2)


_DETACHED = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "glm_moe_dsa",
    "deepseek_v32",
    "deepseek_v3",
)
"""By ``model_type``: families all of whose prompt state is known here."""


def _detached_from(config: Any, mode: Mode, boundary: int) -> int | None:
    """How many tokens are held constant; None for full-sequence training."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
    if mode == "full":
        return None
    if config.model_type not in _DETACHED:
        raise ValueError(
            f"model_type: expected one of {', '.join(_DETACHED)} to detach the prompt state, got "
            f"{config.model_type!r}; compare it against 'full'"
        )
    return boundary


def ordinary_log_probs(
    model: nn.Module,
    prompt: Tensor,
    response: Tensor,
    *,
    mode: Mode,
    temperature: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """Log-probs and entropies of one response by one pass over prompt and response.

    Only logits that predict a response token are made, so memory is that of a trainer that has
    learned not to waste it on the prompt's logits.

    Args:
        model: a stock causal LM, or a peft wrapper of one; not driven.
        prompt: token ids, [P] int64.
        response: token ids, [R] int64; R may be 0.
        mode: whether gradients may flow through the prompt state.

    Returns:
        LogProbs, [R] each, in float32 or wider, with the graph of the whole pass.

    Raises:
        ValueError: the mode is unknown, or has no meaning for the model's family.
    """
    boundary = _detached_from(model.config, mode, prompt.numel() - 1)
    cache = None if boundary is None else _DetachedPrompt(boundary)
    tokens = torch.cat([prompt, response]).to(next(model.parameters()).device)
    with gated_delta_nets(model, boundary), latent_attentions(model, boundary):
        out = model(
            input_ids=tokens[None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=response.numel() + 1,
        )
    logits = out.logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(1, tokens[prompt.numel() :, None])[:, 0]
    return LogProbs(chosen, -(log_p.exp() * log_p).sum(-1) if entropy else torch.zeros_like(chosen))


def ordinary_training(
    model: nn.Module, groups: Sequence[Group], objective: Objective, *, mode: Mode
) -> Outcome:
    """Forward and backward of every row, each with its whole prompt, one row at a time.

    Gradients are added to those the parameters already have.

    Raises:
        ValueError: see :func:`ordinary_log_probs`.
    """
    total, rows = 0.0, {}
    for group in groups:
        for row in group.rows:
            out = ordinary_log_probs(
                model,
                group.prompt,
                row.response,
                mode=mode,
                temperature=objective.temperatures[row.index],
                entropy=objective.entropy_coeff != 0,
            )
            loss = objective.loss(row, out)
            loss.backward()
            total += loss.item()
            rows[row.index] = LogProbs(out.log_probs.detach(), out.entropy.detach())
    return Outcome(total, rows, gradients_of(model))
