"""The responses of one group, depth first over their tree.

A node's tokens are run once. If something comes after them, a further block or a child, they are
run forward first and leave their state on a branch; when all below a node is done, it is walked in
reverse. A leaf of one block is a single pass, or with its neighbours a row of one (``waves.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.groups import Group, Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.models import DrivenModel
from longstraw_backend.state import Segment

from .advance import Block, own_tokens, predict, spans
from .meter import Meter
from .pace import Pace, Pass
from .reverse import backward_of, recorded, reverse_prompt, reverse_response, seen
from .tree import Node
from .waves import is_inner, num_tokens, padded, rows_of, waves

__all__ = ["ResponseWalk", "passes_of"]


def passes_of(
    tree: Sequence[Node], prompt_tokens: int, config: LongStrawConfig, *, grad: bool
) -> Iterator[tuple[Pass, int]]:
    """Calls of the model, in order, that a group takes after its prompt is captured, and how many
    tokens each has."""
    yield from _passes_of_tree(tree, config, grad)
    if grad and tree and config.gradient == "exact":
        for part in reversed(list(spans(prompt_tokens - 1, config.capture_tokens))):
            yield Pass.PROMPT, part.stop - part.start


def _passes_of_tree(
    tree: Sequence[Node], config: LongStrawConfig, grad: bool
) -> Iterator[tuple[Pass, int]]:
    for wave in waves(tree, config):
        if is_inner(wave[0], config):
            yield from _passes_of_inner(wave[0], config, grad)
        else:
            yield Pass.REPLAY if grad else Pass.SCORE, num_tokens(wave)


def _passes_of_inner(node: Node, config: LongStrawConfig, grad: bool) -> Iterator[tuple[Pass, int]]:
    sizes = [p.stop - p.start for p in spans(node.inputs.numel(), config.response_block)]
    yield from ((Pass.SCORE, size) for size in sizes)
    yield from _passes_of_tree(node.children, config, grad)
    if grad:
        yield from ((Pass.REPLAY, size) for size in reversed(sizes))


@dataclass
class ResponseWalk:
    """Scores or replays trees of responses.

    Attributes:
        on_row: gets each row with its log-probs. In a replay these have a graph of their own: it
            must run the backward of the row's loss, which comes to an end there and is taken on
            from there when all rows of a pass have had theirs.
        entropy: whether entropies are wanted.
    """

    model: DrivenModel
    config: LongStrawConfig
    pace: Pace
    meter: Meter
    bar: tqdm[None]
    on_row: Callable[[Row, LogProbs], None]
    entropy: bool

    def score(self, tree: Sequence[Node], below: Segment, path: Sequence[LogProbs] = ()) -> None:
        """Log-probs of all rows, without a graph, over the state ``below``."""
        for wave in waves(tree, self.config):
            if is_inner(wave[0], self.config):
                self._score_inner(wave[0], below, path)
            else:
                self._score_wave(wave, below, path)

    def _score_wave(self, wave: Sequence[Node], below: Segment, path: Sequence[LogProbs]) -> None:
        with self._turn(Pass.SCORE, num_tokens(wave)):
            block = self._block(*padded(wave), wave[0].temperature)
            values = seen(predict(self.model, block, below), block.length, self.model.ranks)
        self._finish_wave(wave, values, path)

    def _score_inner(self, node: Node, below: Segment, path: Sequence[LogProbs]) -> None:
        with self._branch(node, below) as segment:
            here = [*path, self._forward(node, segment)]
            self._finish(node, here)
            self.score(node.children, segment, here)

    def replay(self, tree: Sequence[Node], below: Segment, path: Sequence[LogProbs] = ()) -> None:
        """The same, and the gradient of all losses. Cotangents of ``below`` add up in it if it is
        tracked."""
        for wave in waves(tree, self.config):
            if is_inner(wave[0], self.config):
                self._replay_inner(wave[0], below, path)
            else:
                self._replay_wave(wave, below, path)

    def _replay_wave(self, wave: Sequence[Node], below: Segment, path: Sequence[LogProbs]) -> None:
        with self._turn(Pass.REPLAY, num_tokens(wave)):
            block = self._block(*padded(wave), wave[0].temperature)
            out = predict(self.model, block, below, grad=True, checkpointing=self._checkpointing)
            leaves = recorded(seen(out, block.length, self.model.ranks))
            self._finish_wave(wave, leaves, path)
            backward_of(out, leaves, self.model.ranks)

    def _replay_inner(self, node: Node, below: Segment, path: Sequence[LogProbs]) -> None:
        dtype = getattr(torch, self.config.cotangent_dtype)
        with self._branch(node, below, dtype) as segment:
            leaves = recorded(self._forward(node, segment))
            here = [*path, leaves]
            self._finish(node, here)
            self.replay(node.children, segment, here)

            def turn(tokens: int) -> AbstractContextManager[None]:
                held = segment.nbytes + segment.cotangent_nbytes
                self.meter.branch_bytes = max(self.meter.branch_bytes, held)
                return self._turn(Pass.REPLAY, tokens)

            reverse_response(
                self.model,
                self._block_of(node),
                leaves,
                segment,
                self.config.response_block,
                turn,
                checkpointing=self._checkpointing,
            )

    def reverse_prompt(self, group: Group, segment: Segment) -> None:
        """Take the cotangents of the prompt's state on, down to its first token."""
        self.meter.cotangent_bytes = max(self.meter.cotangent_bytes, segment.cotangent_nbytes)
        reverse_prompt(
            self.model,
            group.prompt[:-1].to(self.model.device),
            segment,
            self.config.capture_tokens,
            lambda tokens: self._turn(Pass.PROMPT, tokens),
            checkpointing=self._checkpointing,
        )

    @property
    def _checkpointing(self) -> bool:
        return bool(self.config.activation_checkpointing)

    def _branch(
        self, node: Node, below: Segment, cotangents: torch.dtype | None = None
    ) -> AbstractContextManager[Segment]:
        tokens = node.inputs.numel()
        room = own_tokens(tokens, self.config.response_block, self.model.ranks)
        return below.branch(tokens, cotangents, room)

    def _block_of(self, node: Node) -> Block:
        return self._block(node.inputs, node.targets, node.temperature)

    def _block(self, inputs: Tensor, targets: Tensor, temperature: float) -> Block:
        return Block(inputs, targets, temperature, self.entropy, self.config.head_chunk_tokens)

    def _forward(self, node: Node, segment: Segment) -> LogProbs:
        """All blocks of a node, whose state stays on its branch."""
        block, parts = self._block_of(node), []
        for part in spans(node.inputs.numel(), self.config.response_block):
            with self._turn(Pass.SCORE, part.stop - part.start):
                out = predict(self.model, block[part], segment, commit=True)
                parts.append(seen(out, part.stop - part.start, self.model.ranks))
        return _joined(parts)

    def _finish_wave(
        self, wave: Sequence[Node], values: LogProbs, path: Sequence[LogProbs]
    ) -> None:
        for node, own in zip(wave, rows_of(values, wave), strict=True):
            self._finish(node, [*path, own])

    def _finish(self, node: Node, path: Sequence[LogProbs]) -> None:
        for row in node.rows:
            self.on_row(row, _joined(path))

    @contextmanager
    def _turn(self, kind: Pass, tokens: int) -> Iterator[None]:
        with self.pace.turn(kind):
            yield
        self.meter.forward_tokens += tokens
        if kind != Pass.SCORE:
            self.meter.backward_tokens += tokens
            self.meter.graph_tokens_peak = max(self.meter.graph_tokens_peak, tokens)
        self.bar.update(tokens)


def _joined(parts: Sequence[LogProbs]) -> LogProbs:
    if len(parts) == 1:
        return parts[0]
    return LogProbs(*(torch.cat(field) for field in zip(*parts, strict=True)))
