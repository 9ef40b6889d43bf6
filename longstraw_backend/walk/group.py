"""One group: capture the prompt, then score or replay its responses against that state.

The prompt boundary lies before the last prompt token: a replay begins with that token, so that the
first response token's log-prob comes out of the replay like all others. A response of R tokens is
replayed as [last prompt token, response[:-1]], R tokens predicting R targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel
from longstraw_backend.state import PromptKey, PromptStore, Segment

from .advance import advance
from .heads import log_probs_head
from .meter import Meter

__all__ = ["GroupWalk", "capture_prompt", "num_chunks", "replay", "score"]


def num_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Model calls that capturing a prompt of this length takes; 0 for a prompt of one token."""
    return -(-(prompt_tokens - 1) // chunk_tokens)


def capture_prompt(
    model: DrivenModel, prompt: Tensor, config: LongStrawConfig, *, quiet: bool = True
) -> Segment:
    """Run a prompt up to its boundary without autograd and return the state it leaves.

    Args:
        prompt: token ids, [P] int64; the first P - 1 are captured.
        quiet: show no progress bar.
    """
    boundary = prompt.numel() - 1
    segment = model.segment(boundary, config.page_tokens, config.placement)
    tokens = prompt[:boundary].to(model.device)
    with tqdm(
        total=boundary, unit="tok", unit_scale=True, desc="capture", disable=quiet, delay=5
    ) as bar:
        for chunk in tokens.split(config.chunk_tokens):
            if chunk.numel():
                advance(model, chunk[None], segment)
                bar.update(chunk.numel())
    return segment


def _respond(
    model: DrivenModel,
    segment: Segment,
    prompt: Tensor,
    response: Tensor,
    config: LongStrawConfig,
    *,
    grad: bool,
    temperature: float,
    entropy: bool,
) -> LogProbs:
    tokens = torch.cat([prompt[-1:], response[:-1]]).to(model.device)
    head = log_probs_head(
        response.to(model.device),
        temperature,
        entropy=entropy,
        chunk_tokens=config.head_chunk_tokens,
    )
    with segment.hold():
        out = advance(
            model,
            tokens[None],
            segment,
            grad=grad,
            commit=False,
            head=head,
            checkpointing=bool(config.activation_checkpointing),
        )
    return LogProbs(*out)


def score(
    model: DrivenModel,
    segment: Segment,
    prompt: Tensor,
    response: Tensor,
    config: LongStrawConfig,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """Log-probs (and entropies) of one response, [R] each, without a graph.

    Bitwise equal to :func:`replay` with the same weights and state.
    """
    return _respond(
        model,
        segment,
        prompt,
        response,
        config,
        grad=False,
        temperature=temperature,
        entropy=entropy,
    )


def replay(
    model: DrivenModel,
    segment: Segment,
    prompt: Tensor,
    response: Tensor,
    config: LongStrawConfig,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> LogProbs:
    """The same under autograd: the graph holds this response alone. Run backward before another."""
    return _respond(
        model,
        segment,
        prompt,
        response,
        config,
        grad=True,
        temperature=temperature,
        entropy=entropy,
    )


@dataclass
class GroupWalk:
    """The verbs with a store, a meter and a version of the weights, as a worker uses them."""

    model: DrivenModel
    config: LongStrawConfig
    store: PromptStore
    quiet: bool = True

    def captured(self, prompt: Tensor, key: PromptKey, meter: Meter) -> Segment:
        """The prompt's state from the store, or captured now."""
        segment = self.store.get(key)
        if segment is None:
            with meter.phase("capture", self.model.device), torch.no_grad():
                segment = capture_prompt(self.model, prompt, self.config, quiet=self.quiet)
            meter.prompt_tokens_captured += segment.length
            self.store.put(key, segment)
        meter.state_bytes = max(meter.state_bytes, self.store.nbytes)
        return segment

    def scored(
        self,
        segment: Segment,
        prompt: Tensor,
        response: Tensor,
        meter: Meter,
        *,
        temperature: float,
        entropy: bool,
    ) -> LogProbs:
        """Score one response and count it."""
        with meter.phase("score", self.model.device):
            out = score(
                self.model,
                segment,
                prompt,
                response,
                self.config,
                temperature=temperature,
                entropy=entropy,
            )
        self._count(meter, prompt, response)
        return out

    @contextmanager
    def replayed(
        self,
        segment: Segment,
        prompt: Tensor,
        response: Tensor,
        meter: Meter,
        *,
        temperature: float,
        entropy: bool,
    ) -> Iterator[LogProbs]:
        """Replay one response; run its backward inside the block, which is what is timed."""
        with meter.phase("replay", self.model.device), segment.hold():
            yield replay(
                self.model,
                segment,
                prompt,
                response,
                self.config,
                temperature=temperature,
                entropy=entropy,
            )
        meter.graph_tokens_peak = max(meter.graph_tokens_peak, response.numel())
        self._count(meter, prompt, response)

    def _count(self, meter: Meter, prompt: Tensor, response: Tensor) -> None:
        meter.full_sequence_tokens += prompt.numel() + response.numel()
        meter.response_tokens += response.numel()
