"""Capture a prompt, and keep its state.

The prompt boundary lies before the last prompt token: a replay begins with that token, so that the
first response token's log-prob comes out of the replay like all others. A response of R tokens is
replayed as [last prompt token, response[:-1]], R tokens predicting R targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.models import DrivenModel
from longstraw_backend.state import PromptKey, PromptStore, Segment

from .advance import advance, own_tokens
from .meter import Meter

__all__ = ["GroupWalk", "capture_prompt", "num_chunks", "prompt_segment"]


def num_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Model calls that capturing a prompt of this length takes; 0 for a prompt of one token."""
    return -(-(prompt_tokens - 1) // chunk_tokens)


def prompt_segment(model: DrivenModel, tokens: int, config: LongStrawConfig) -> Segment:
    """Room for the state of a prompt of which so many tokens are captured."""
    cotangents = getattr(torch, config.cotangent_dtype) if config.gradient == "exact" else None
    room = own_tokens(tokens, config.capture_tokens, model.ranks)
    return model.segment(tokens, config.page_tokens, config.placement, cotangents, room)


def capture_prompt(
    model: DrivenModel, prompt: Tensor, config: LongStrawConfig, *, quiet: bool = True
) -> Segment:
    """Run a prompt up to its boundary without autograd and return the state it leaves.

    Args:
        prompt: token ids, [P] int64; the first P - 1 are captured.
        quiet: show no progress bar.
    """
    boundary = prompt.numel() - 1
    segment = prompt_segment(model, boundary, config)
    tokens = prompt[:boundary].to(model.device)
    with tqdm(
        total=boundary, unit="tok", unit_scale=True, desc="capture", disable=quiet, delay=5
    ) as bar:
        for chunk in tokens.split(config.capture_tokens):
            if chunk.numel():
                advance(model, chunk[None], segment)
                bar.update(chunk.numel())
    return segment


@dataclass
class GroupWalk:
    """A driven model with the states of the prompts it has captured."""

    model: DrivenModel
    config: LongStrawConfig
    store: PromptStore
    quiet: bool = True

    def stored(self, key: PromptKey) -> Segment | None:
        """The prompt's state if the store has it in the form that the gradient needs."""
        segment = self.store.get(key)
        return segment if segment and segment.tracked >= self._tracked else None

    @property
    def _tracked(self) -> bool:
        return self.config.gradient == "exact"

    def captured(self, prompt: Tensor, key: PromptKey, meter: Meter) -> Segment:
        """The prompt's state from the store, or captured now."""
        segment = self.stored(key)
        if segment is None:
            with meter.phase("capture", self.model), torch.no_grad():
                segment = capture_prompt(self.model, prompt, self.config, quiet=self.quiet)
            meter.prompt_tokens_captured += segment.length
            self.store.put(key, segment)
        meter.state_bytes = max(meter.state_bytes, self.store.nbytes)
        return segment
