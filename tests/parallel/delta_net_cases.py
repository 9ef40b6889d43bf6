"""A gated-delta-net layer of a stock module, on one rank and over several: results to compare.

Legend: B rows, T tokens of a block, D hidden size, C channels, W width of the convolution, N value
heads, K and V head dims.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.models.cotangents import collected, release
from longstraw_backend.models.delta_by_head import deal_channels, deal_heads, run_by_head
from longstraw_backend.models.delta_by_position import run_by_position
from longstraw_backend.models.delta_heads import DeltaHeads
from longstraw_backend.models.gated_delta_net import finished, projected
from longstraw_backend.parallel.exchange import Ranks
from longstraw_backend.state import Recurrent
from longstraw_backend.tiny import tiny_model
from longstraw_backend.wide import StaysWide

ROWS, HIDDEN = 2, 64


@dataclass(frozen=True)
class Case:
    """A layer and blocks in a row: tokens that each rank has of them, and how many are real."""

    family: str
    key_heads: int
    value_heads: int
    blocks: tuple[tuple[int, int], ...]


@dataclass
class Inputs:
    """Leaves of the whole layer, and cotangents of all that it gives."""

    mixer: Any
    heads: DeltaHeads
    hidden: list[Tensor]
    before: Recurrent
    dout: list[Tensor]
    dafter: Recurrent

    def leaves(self) -> dict[str, Tensor]:
        blocks = {f"block {i}": x for i, x in enumerate(self.hidden)}
        return blocks | self.before._asdict() | dict(self.mixer.named_parameters())

    def gradients(self) -> dict[str, Tensor]:
        leaves = self.leaves().items()
        return {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves}


Result = tuple[list[Tensor], Recurrent, dict[str, Tensor]]
"""Outputs by block, state after the last, gradients by name of the leaf."""

Layer = tuple[str, int, int]
"""Family, key and value heads."""
BY_HEAD: list[Layer] = [
    ("qwen3_5", 4, 4),
    ("qwen3_next", 4, 8),
    ("qwen3_5", 2, 4),
    ("qwen3_next", 1, 4),
]
BY_POSITION: list[Layer] = [("qwen3_5", 1, 1), ("qwen3_next", 2, 4)]


def cases(world: int, layers: list[Layer]) -> list[Case]:
    """Blocks that are full, padded, over one chunk of the rule, mostly padding, and in a row."""
    plans = (
        ((5, 5 * world),),
        ((5, 5 * world - 3),),
        ((70 // world + 1, 67),),
        ((1, 1),),
        ((2, world + 1), (1, world - 1), (7, 7 * world - 9)),
    )
    return [Case(*layer, plan) for layer, plan in product(layers, plans)]


def inputs(case: Case, world: int) -> Inputs:
    """The same on every rank."""
    mixer = _mixer(case)
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def leaf(*shape: int) -> Tensor:
        return noise(*shape).requires_grad_()

    heads = DeltaHeads.of(mixer)
    state = [x.shape for x in heads.nothing(noise(ROWS, 1, 1))]
    sizes = [(ROWS, run * world, HIDDEN) for run, _ in case.blocks]
    dout = [noise(*size) for size in sizes]
    for cotangent, (_, real) in zip(dout, case.blocks, strict=True):
        cotangent[:, real:] = 0
    hidden = [leaf(*size) for size in sizes]
    before, dafter = (Recurrent(*(make(*x) for x in state)) for make in (leaf, noise))
    return Inputs(mixer, heads, hidden, before, dout, dafter)


def _mixer(case: Case) -> Any:
    return deepcopy(_stock(case.family, case.key_heads, case.value_heads))


@cache
def _stock(family: str, key_heads: int, value_heads: int) -> Any:
    options: dict[str, Any] = dict(
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
    )
    model: Any = tiny_model(family, dtype=torch.float64, **options)
    return model.model.layers[0].linear_attn


def on_one_rank(case: Case, world: int) -> Result:
    """Real tokens alone."""
    x = inputs(case, world)
    state, outs = x.before, []
    for hidden, (_, real) in zip(x.hidden, case.blocks, strict=True):
        out, state = through(x.mixer, hidden[:, :real], state, x.heads.run)
        outs.append(out)
    found = zip([*outs, *state], [*x.dout, *x.dafter], strict=True)
    sum((y * d[:, : y.shape[1]]).sum() for y, d in found).backward()  # type: ignore[union-attr]
    return [y.detach() for y in outs], _constant(state), x.gradients()


def through(mixer: Any, hidden: Tensor, before: Recurrent, run: Any) -> tuple[Tensor, Recurrent]:
    """Hidden states after the layer, and its state."""
    with StaysWide():  # gradients rounded to float32 before they are summed would differ
        x, z, b, a = projected(mixer, hidden)
        out, after = run(x, b, a, before)
        return finished(mixer, out, z), after


def by_head(case: Case, ranks: Ranks) -> Result:
    """This rank's runs of the outputs, state of its heads, and part of every gradient."""
    x = inputs(case, ranks.size)
    state = own_state(x.heads, x.before, ranks)
    dstate = own_state(x.heads, x.dafter, ranks)
    share = deal_channels(x.heads, _copies_of_channels(x.heads, ranks.size), ranks.size)
    dstate = Recurrent(dstate.conv / share[ranks.rank][:, None], dstate.recurrent)
    return _over_ranks(case, x, ranks, run_by_head, state, dstate)


def by_position(case: Case, ranks: Ranks) -> Result:
    """This rank's runs of the outputs, the whole state, and part of every gradient."""
    x = inputs(case, ranks.size)
    share = 2 * (ranks.rank + 1) / (ranks.size * (ranks.size + 1))
    dstate = Recurrent(*(d * share for d in x.dafter))
    return _over_ranks(case, x, ranks, run_by_position, x.before, dstate)


def own_state(heads: DeltaHeads, state: Recurrent, ranks: Ranks) -> Recurrent:
    conv = deal_channels(heads, state.conv.mT, ranks.size)[ranks.rank].mT
    recurrent = deal_heads(state.recurrent.movedim(1, -1), ranks.size)[ranks.rank]
    return Recurrent(conv, recurrent.movedim(-1, 1))


def _copies_of_channels(heads: DeltaHeads, size: int) -> Tensor:
    """On how many ranks a channel is, [C]."""
    channels = torch.zeros(heads.conv_weight.shape[0], dtype=torch.float64).requires_grad_()
    deal_channels(heads, channels, size).sum().backward()
    assert channels.grad is not None
    return channels.grad


def _over_ranks(
    case: Case,
    x: Inputs,
    ranks: Ranks,
    function: Callable[..., Any],
    state: Recurrent,
    dstate: Recurrent,
) -> Result:
    """Forward without autograd, then block by block from the last, as a reverse walk does it."""

    def block(number: int, state: Recurrent) -> tuple[Tensor, Recurrent]:
        run, real = case.blocks[number]
        mine = x.hidden[number][:, ranks.rank * run : (ranks.rank + 1) * run]
        return through(x.mixer, mine, state, lambda *t: function(x.heads, *t, ranks, real))

    outs, states = [], [state]
    with torch.no_grad():
        for number in range(len(case.blocks)):
            out, after = block(number, states[-1])
            outs.append(out)
            states.append(after)
    for number in reversed(range(len(case.blocks))):
        sinks = [torch.zeros_like(s) for s in states[number]]
        before = state  # of the first block, from the leaves
        if number:
            before = Recurrent(*map(collected, states[number], sinks))
        out, after = block(number, before)
        dout = x.dout[number].chunk(ranks.size, dim=1)[ranks.rank]
        (release(out, dstate, after) * dout).sum().backward()
        dstate = Recurrent(*sinks)
    return outs, _constant(states[-1]), x.gradients()


def _constant(state: Recurrent) -> Recurrent:
    return Recurrent(*(x.detach() for x in state))


def all_by_head(rank: int) -> list[Result]:
    ranks = Ranks.of(dist.group.WORLD)
    return [by_head(case, ranks) for case in cases(ranks.size, BY_HEAD)]


def all_by_position(rank: int) -> list[Result]:
    ranks = Ranks.of(dist.group.WORLD)
    return [by_position(case, ranks) for case in cases(ranks.size, BY_POSITION)]
