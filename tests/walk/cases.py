"""Inputs, both sides and tolerances that the tests of the walk share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longstraw_backend.compare.distances import Distance, distance
from longstraw_backend.compare.settings import DELTA_NET_GRADIENT_BAR
from longstraw_backend.compare.sides import driven, measured, replay_batch, walk_of
from longstraw_backend.config import LongStrawConfig
from longstraw_backend.groups import Group, group_rows
from longstraw_backend.models import DrivenModel
from longstraw_backend.oracle import Mode, Objective, Outcome, ordinary_training
from longstraw_backend.state import Segment
from longstraw_backend.tiny import AVAILABLE, tiny_model
from longstraw_backend.walk import Block, GroupWalk, advance, predict

__all__ = [
    "BARS",
    "HYBRIDS",
    "LATENT",
    "VOCAB",
    "batch",
    "check",
    "chunk_peak",
    "log_probs",
    "model",
    "one_group",
    "ours",
    "theirs",
    "walk",
]

VOCAB = 311
BARS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The documented bars: largest error of a log-prob, and relative L2 of the gradient."""
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families with gated-delta-net layers."""
LATENT = tuple(f for f in ("glm_moe_dsa", "deepseek_v32", "deepseek_v3") if f in AVAILABLE)
"""Families with latent attention that the installed transformers has."""


def model(family: str = "qwen3", dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """A tiny model whose attention is far from uniform; equal calls give equal weights."""
    return tiny_model(family, dtype=dtype, **({"initializer_range": 0.1} | options))


def tokens(count: int, seed: int) -> Tensor:
    """[count] token ids."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def batch(
    rows: Sequence[tuple[int, int]], *, entropy_coeff: float = 0.03, temperatures: Any = 1.0
) -> tuple[list[Group], Objective]:
    """Groups of rows given as (prompt length, response length); equal lengths share the prompt."""
    prompts = [tokens(p, seed=p) for p, _ in rows]
    responses = [tokens(r, seed=1000 + i) for i, (_, r) in enumerate(rows)]
    noise = torch.Generator().manual_seed(7)
    weights = [torch.randn(r, generator=noise, dtype=torch.float64) for _, r in rows]
    each = temperatures if isinstance(temperatures, list) else [temperatures] * len(rows)
    return group_rows(prompts, responses), Objective(weights, each, entropy_coeff)


def one_group(prompt: int, lengths: Sequence[int]) -> tuple[list[Group], Objective]:
    """A prompt with responses of these lengths."""
    return batch([(prompt, length) for length in lengths])


def walk(stock: nn.Module, **options: Any) -> GroupWalk:
    """A walk over a model, driven now; chunks that don't divide the prompt and small pages."""
    defaults: dict[str, Any] = {"chunk_tokens": 13, "page_tokens": 10, "progress": False}
    return walk_of(driven(stock), LongStrawConfig(**(defaults | options)))


def ours(
    stock: nn.Module, groups: Sequence[Group], objective: Objective, **options: Any
) -> Outcome:
    """Capture and replay; drives ``stock``."""
    return replay_batch(walk(stock, **options), groups, objective)


def theirs(
    stock: nn.Module, groups: Sequence[Group], objective: Objective, mode: Mode = "detached"
) -> Outcome:
    """Ordinary autograd."""
    return ordinary_training(stock, groups, objective, mode=mode)


def chunk_peak(driven: DrivenModel, prompt: int, chunk: int) -> int:
    """Peak bytes of one capture chunk after ``prompt`` tokens."""
    segment = driven.segment(prompt + 2 * chunk, 1 << 20)
    with torch.no_grad():
        for block in tokens(prompt, 1).split(512):
            advance(driven, block[None], segment)
        block = tokens(chunk, 2)[None]
        return measured(lambda: advance(driven, block, segment), torch.device("cpu")).peak_bytes


def log_probs(
    one: GroupWalk,
    segment: Segment,
    prompt: Tensor,
    response: Tensor,
    *,
    temperature: float = 1.0,
    grad: bool = False,
) -> Tensor:
    """Of one response in a single block over its prompt's state, [R]."""
    inputs = torch.cat([prompt[-1:], response[:-1]])
    block = Block(inputs, response, temperature, False, one.config.head_chunk_tokens)
    return predict(one.model, block, segment, grad=grad).log_probs


def check(
    found: Outcome,
    expected: Outcome,
    dtype: torch.dtype = torch.float64,
    family: str | None = None,
) -> Distance:
    """Assert that log-probs, entropies, loss and gradient are within the bars of a dtype."""
    apart, bar = distance(found, expected), BARS[dtype]
    assert apart.logprob_max_abs <= bar
    assert apart.grad_rel_l2 <= (max(bar, DELTA_NET_GRADIENT_BAR) if family in HYBRIDS else bar)
    assert abs(found.loss - expected.loss) <= bar * max(1.0, abs(expected.loss))
    for index, row in expected.rows.items():
        entropy = found.rows[index].entropy.to(row.entropy)
        assert torch.allclose(entropy, row.entropy, rtol=0, atol=bar)
    return apart
