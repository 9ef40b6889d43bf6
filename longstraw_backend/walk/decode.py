"""Decode responses of one prompt together, on one branch over its shared state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw_backend.groups import Group, prompt_digest
from longstraw_backend.kernels.sampling import sample_tokens
from longstraw_backend.models import DrivenModel
from longstraw_backend.parallel import Lockstep
from longstraw_backend.parallel.exchange import all_gathered
from longstraw_backend.state import PromptKey, Segment

from .advance import advance
from .batch import captured_in_lockstep
from .capture import GroupWalk
from .heads import last_logits
from .meter import Meter

__all__ = ["Sample", "Sampling", "add_tokens", "decode", "generate"]


@dataclass(frozen=True)
class Sampling:
    """How one response is drawn.

    Attributes:
        max_new_tokens: stop after so many tokens (``length``).
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep so many tokens; 0 or -1 keeps all.
        eos_token_ids: stop at one of these, which is kept (``stop``).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k: expected -1, 0 or a positive number, got {self.top_k}")


@dataclass
class Sample:
    """A response and each token's log-prob under the distribution it was drawn from, in nats."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str = ""

    def add(self, token: int, log_prob: float, sampling: Sampling) -> None:
        """Append a token unless the response has ended."""
        if self.stop_reason:
            return
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if token in sampling.eos_token_ids:
            self.stop_reason = "stop"
        elif len(self.token_ids) == sampling.max_new_tokens:
            self.stop_reason = "length"


def add_tokens(
    samples: Sequence[Sample], tokens_B: Tensor, log_probs_B: Tensor, samplings: Sequence[Sampling]
) -> None:
    """Append each row's token to its response, unless that has ended."""
    drawn = zip(samples, tokens_B.tolist(), log_probs_B.tolist(), samplings, strict=True)
    for sample, token, log_prob, sampling in drawn:
        sample.add(token, log_prob, sampling)


@torch.no_grad()
def decode(
    model: DrivenModel,
    segment: Segment,
    prompt: Tensor,
    samplings: Sequence[Sampling],
    *,
    generator: torch.Generator,
    lockstep: Lockstep,
) -> list[Sample]:
    """Draw one response per entry of ``samplings``; all advance together until the last has ended.

    Args:
        segment: the prompt's state up to its boundary; unchanged afterwards.
        prompt: token ids, [P] int64.
        generator: source of randomness, on the model's device.
        lockstep: ranks that share the module and all decode the same requests.
    """
    samples = [Sample() for _ in samplings]
    tokens = prompt[-1:].to(model.device).expand(len(samples))
    with segment.branch(max(s.max_new_tokens for s in samplings)) as branch:
        while not all(s.stop_reason for s in samples):
            (logits,) = advance(model, tokens[:, None], branch, head=last_logits)
            logits = all_gathered(logits, model.ranks.named("logits"))[
                0
            ]  # the token is the first rank's
            tokens, log_probs = sample_tokens(logits, samplings, generator)
            tokens = lockstep.same_tokens(tokens.contiguous())
            add_tokens(samples, tokens, log_probs, samplings)
    return samples


def generate(
    walk: GroupWalk,
    prompt: Tensor,
    key: Callable[[bytes], PromptKey],
    samplings: Sequence[Sampling],
    seed: int,
    meter: Meter,
    lockstep: Lockstep,
) -> list[Sample]:
    """Responses to one prompt, whose state is captured or, if it is in the store, reused.

    Args:
        key: from the prompt's digest to the key of its state under the present weights.
        seed: of this call; the same call with the same seed draws the same responses.
    """
    group = Group(prompt, prompt_digest(prompt))
    segment = captured_in_lockstep(walk, group, key(group.digest), meter, lockstep)
    assert segment is not None
    generator = torch.Generator(device=walk.model.device).manual_seed(seed)
    with meter.phase("decode", walk.model):
        return decode(
            walk.model, segment, prompt, samplings, generator=generator, lockstep=lockstep
        )
