"""A batch of groups, one after the other; the only loop over groups and rows there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tqdm import tqdm

from longstraw_backend.groups import Group, Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey, Segment

from .advance import advance
from .group import GroupWalk, num_chunks
from .heads import log_probs_head
from .meter import Meter

__all__ = ["BatchRun", "captured_in_lockstep"]


def _idle(model: DrivenModel, *, head: bool, grad: bool = False) -> None:
    """A pass that changes nothing, for a rank that others wait for: it must gather what they do,
    the output embedding too if they use the head."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    log_probs = log_probs_head(token[0], 1.0, entropy=False, chunk_tokens=1) if head else None
    empty = model.segment(0, 1)
    out = advance(model, token, empty, grad=grad, commit=False, head=log_probs)
    if grad:
        (out[0].sum() * 0.0).backward()


def captured_in_lockstep(
    walk: GroupWalk, group: Group | None, key: PromptKey | None, meter: Meter, lockstep: Lockstep
) -> Segment | None:
    """The group's prompt state; other ranks may take more chunks, or have no group at all."""
    own = 0
    if group is not None and key is not None and walk.store.get(key) is None:
        own = num_chunks(group.prompt.numel(), walk.config.chunk_tokens)
    (most,) = lockstep.most([own])
    segment = (
        walk.captured(group.prompt, key, meter) if group is not None and key is not None else None
    )
    for _ in range(most - own):
        _idle(walk.model, head=False)
    return segment


@dataclass
class BatchRun:
    """Score or replay all rows of a batch.

    Attributes:
        key: from a group to the key of its prompt state.
        temperature: from a row to its sampling temperature.
        on_row: called with each row and its log-probs. When replaying it must run the backward, if
            the log-probs carry a graph; a row without a response comes with empty log-probs.
        last: context in which passes run; the argument says whether it is the last with a backward.
    """

    walk: GroupWalk
    meter: Meter
    lockstep: Lockstep
    key: Callable[[Group], PromptKey]
    temperature: Callable[[Row], float]
    on_row: Callable[[Row, LogProbs], None]
    entropy: bool = False
    grad: bool = True
    last: Callable[[bool], AbstractContextManager[None]] = lambda _: nullcontext()

    def run(self, groups: Sequence[Group]) -> None:
        """All groups in order; ranks stay in lockstep."""
        plan = self.lockstep.most([sum(r.response.numel() > 0 for r in g.rows) for g in groups])
        total, done = sum(plan), 0
        with tqdm(
            total=total, unit="row", desc=self._verb, disable=self.walk.quiet, delay=5
        ) as bar:
            for slot, passes in enumerate(plan):
                group = groups[slot] if slot < len(groups) else None
                segment = captured_in_lockstep(
                    self.walk, group, self.key(group) if group else None, self.meter, self.lockstep
                )
                rows = group.rows if group is not None else []
                for row in rows:
                    if row.response.numel() == 0:
                        self.on_row(row, _no_log_probs(self.walk.model))
                todo = [r for r in rows if r.response.numel() > 0]
                for place in range(passes):
                    done += 1
                    with self.last(done == total):
                        self._pass(group, segment, todo[place] if place < len(todo) else None)
                    bar.update()

    @property
    def _verb(self) -> str:
        return "replay" if self.grad else "score"

    def _pass(self, group: Group | None, segment: Segment | None, row: Row | None) -> None:
        if group is None or segment is None or row is None:
            _idle(self.walk.model, head=True, grad=self.grad)
            return
        args = segment, group.prompt, row.response, self.meter
        temperature = self.temperature(row)
        if self.grad:
            with self.walk.replayed(*args, temperature=temperature, entropy=self.entropy) as out:
                self.on_row(row, out)
        else:
            out = self.walk.scored(*args, temperature=temperature, entropy=self.entropy)
            self.on_row(row, out)


def _no_log_probs(model: DrivenModel) -> LogProbs:
    parameter = next(model.module.parameters())
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return LogProbs(*(torch.zeros(0, dtype=wide, device=model.device) for _ in range(2)))
