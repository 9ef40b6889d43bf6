"""The model that is benched, and everything that is the same for all passes of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstraw_backend.compare.inputs import add_adapters
from longstraw_backend.compare.sides import driven
from longstraw_backend.models import DrivenModel
from longstraw_backend.models.block_traffic import Split
from longstraw_backend.models.sizes import ModelSizes, num_routed
from longstraw_backend.parallel import Layout
from longstraw_backend.parallel.sharding import shard
from longstraw_backend.state import Segment
from longstraw_backend.walk import Block, advance
from longstraw_backend.walk.capture import prompt_segment

from .ceilings import Ceilings, roofline_seconds
from .flops import Flops, Training
from .planner import Plan, plan_of
from .settings import Settings
from .shapes import random_model

__all__ = ["Subject", "make_subject"]


@dataclass(frozen=True)
class Subject:
    """A driven random model.

    Attributes:
        text_config: Hugging Face configuration.
        ceilings: of this machine, at the model's sizes.
    """

    settings: Settings
    text_config: Any
    sizes: ModelSizes
    model: DrivenModel
    ceilings: Ceilings

    @property
    def training(self) -> Training:
        """How its FLOPs are counted."""
        s = self.settings
        return Training(s.gradient, s.lora, s.checkpointing)

    @property
    def split(self) -> Split | None:
        """How ranks share a block; None for one rank."""
        s = self.settings
        element = int(getattr(torch, str(s.dtype)).itemsize)
        return None if s.cp == 1 else Split(s.cp, s.ep or 1, element)

    @property
    def sent(self) -> int:
        """Bytes that have left this rank for others."""
        return sum(self.model.ranks.traffic.sent.values())

    def roofline(self, flops: Flops, *, backward: bool = False) -> float:
        """Seconds at the ceilings, with the work shared evenly by all ranks."""
        return roofline_seconds(flops, self.ceilings, backward=backward) / self.settings.cp

    def predicted(self, length: int, phase: str) -> int | None:
        """Peak by the planner; it knows one rank only."""
        return self.plan(length).peak(phase) if self.settings.cp == 1 else None

    def plan(self, length: int) -> Plan:
        """Of a capture that has come to ``length`` tokens: pages are allocated whole."""
        page = self.settings.page_tokens
        allocated = min(self.settings.length, -(-length // page) * page)
        return plan_of(self.text_config, self.sizes, self.settings, allocated)

    def tokens(self, count: int, seed: int = 0) -> Tensor:
        """Random token ids, [count] int64 on the device."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.text_config.vocab_size, (count,), generator=generator)
        return ids.to(self.model.device)

    def response(self, number: int) -> Block:
        """A response as one block."""
        tokens = self.tokens(self.settings.response + 1, seed=1 + number)
        return Block(tokens[:-1], tokens[1:], 1.0, False, self.settings.head_chunk)

    def room(self, tokens: int) -> Segment:
        """An empty segment for so many."""
        return prompt_segment(self.model, tokens, self.settings.config)

    def held_bytes(self, segment: Segment) -> int:
        """Of weights, gradients, and the state and cotangents that rest beside them."""
        here = [layer for layer in segment.layers if not layer.on_host]
        state = sum(layer.nbytes + layer.cotangent_nbytes for layer in here)
        module = self.model.module
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return state + sum(
            x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes
            for x in [*module.parameters(), *module.buffers(), *gradients]
        )


def make_subject(settings: Settings, config: Any, sizes: ModelSizes, ceilings: Ceilings) -> Subject:
    """Make the model, with adapters if wanted, share it out over ranks, and run two chunks to warm
    up; every rank must call it.

    Raises:
        ValueError: the device or peft is missing.
    """
    stock = random_model(config, settings.device, str(settings.dtype))
    if settings.lora:
        stock.requires_grad_(False)
        stock = add_adapters(stock, settings.lora, 0, experts=not num_routed(config))
    subject = Subject(settings, config, sizes, _shared_out(driven(stock), settings), ceilings)
    with torch.no_grad():
        few = min(settings.chunk, settings.length)
        scratch = subject.room(2 * few)
        for part in subject.tokens(2 * few).split(few):
            advance(subject.model, part[None], scratch)
    return subject


def _shared_out(model: DrivenModel, settings: Settings) -> DrivenModel:
    """Parameters sharded over all ranks, which share each prompt."""
    if settings.cp == 1:
        return model
    layout = Layout.of(settings.device, settings.cp, settings.ep or 1)
    return replace(model, module=shard(model.module, layout), ranks=layout.ranks)
