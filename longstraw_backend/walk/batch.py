"""A batch of groups, one after the other; the only loop over groups there is."""

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
from .capture import GroupWalk, num_chunks
from .heads import log_probs_head
from .meter import Meter
from .pace import Pace, Pass, agreed_runs, run_lengths
from .responses import ResponseWalk, passes_of
from .tree import Node, response_tree

__all__ = ["BatchRun", "captured_in_lockstep"]


def captured_in_lockstep(
    walk: GroupWalk, group: Group | None, key: PromptKey | None, meter: Meter, lockstep: Lockstep
) -> Segment | None:
    """The group's prompt state; other ranks may take more chunks, or have no group at all."""
    own, segment = 0, None
    if group is not None and key is not None and not _stored_by_all(walk, key):
        own = num_chunks(group.prompt.numel(), walk.config.capture_tokens)
    (most,) = lockstep.most([own])
    if group is not None and key is not None:
        segment = walk.captured(group.prompt, key, meter)
    for _ in range(most - own):
        _idle(walk.model, head=False, grad=False)
    return segment


def _stored_by_all(walk: GroupWalk, key: PromptKey) -> bool:
    """Whether all ranks that share the prompt still have its state; if not, none has afterwards.
    Their budgets are alike, their shares not quite."""
    here = walk.stored(key) is not None
    lacking = Lockstep(walk.model.ranks.group).most([int(not here)]) != [0]
    if here and lacking:
        walk.store.drop(key)
    return not lacking


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
        config = self.walk.config
        trees = [response_tree(g, self.temperature, config.shared_tokens) for g in groups]
        passes = [
            list(passes_of(tree, group.prompt.numel(), config, grad=self.grad))
            for tree, group in zip(trees, groups, strict=True)
        ]
        plan = agreed_runs(self.lockstep, [run_lengths(k for k, _ in p) for p in passes])
        backwards = sum(n for runs in plan for i, n in enumerate(runs) if i % len(Pass))
        pace = Pace(self._idle, self.last, backwards)
        with tqdm(
            total=sum(tokens for p in passes for _, tokens in p),
            unit="tok",
            unit_scale=True,
            desc=self._verb,
            disable=self.walk.quiet,
            delay=5,
        ) as bar:
            for slot, runs in enumerate(plan):
                here = slot < len(groups)
                segment = self._captured(groups[slot] if here else None)
                pace.begin(runs)
                if here and segment is not None:
                    self._group(groups[slot], trees[slot], segment, pace, bar)
                pace.finish()

    def _idle(self, kind: Pass) -> None:
        _idle(self.walk.model, head=kind != Pass.PROMPT, grad=kind != Pass.SCORE)

    @property
    def _verb(self) -> str:
        return "replay" if self.grad else "score"

    def _captured(self, group: Group | None) -> Segment | None:
        key = self.key(group) if group is not None else None
        return captured_in_lockstep(self.walk, group, key, self.meter, self.lockstep)

    def _group(
        self, group: Group, tree: Sequence[Node], segment: Segment, pace: Pace, bar: tqdm[None]
    ) -> None:
        for row in group.rows:
            if row.response.numel() == 0:
                self.on_row(row, _no_log_probs(self.walk.model))
            self.meter.full_sequence_tokens += group.prompt.numel() + row.response.numel()
            self.meter.response_tokens += row.response.numel()
        model, config = self.walk.model, self.walk.config
        walk = ResponseWalk(model, config, pace, self.meter, bar, self.on_row, self.entropy)
        with self.meter.phase(self._verb, model), segment.hold():
            if not self.grad:
                walk.score(tree, segment)
                return
            segment.drop_cotangents()  # of a walk that failed half way
            walk.replay(tree, segment)
        if tree and config.gradient == "exact":
            with self.meter.phase("prompt_backward", model), segment.hold():
                walk.reverse_prompt(group, segment)


def _idle(model: DrivenModel, *, head: bool, grad: bool) -> None:
    """A pass that changes nothing, for a rank that others wait for: it must gather what they do,
    the output embedding too if they use the head. A gradient without it is a prompt's."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    log_probs = log_probs_head(token[0], 1.0, entropy=False, chunk_tokens=1) if head else None
    out = advance(
        model,
        token,
        model.segment(0, 1),
        grad=grad,
        commit=False,
        reverse=grad and not head,
        head=log_probs,
    )
    if grad:
        (out[0].sum() * 0.0).backward()


def _no_log_probs(model: DrivenModel) -> LogProbs:
    parameter = next(model.module.parameters())
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return LogProbs(*(torch.zeros(0, dtype=wide, device=model.device) for _ in range(2)))
