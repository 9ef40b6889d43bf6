"""What stays alive, and what never changes: the graph's size and the prompt state."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from longstraw_backend.compare.distances import bitwise_equal
from longstraw_backend.compare.sides import replay_batch
from longstraw_backend.config import Gradient
from longstraw_backend.groups import Row
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey, Segment
from longstraw_backend.walk import BatchRun, GroupWalk, Meter, Sampling, decode
from tests.walk.cases import HYBRIDS, LATENT, model, one_group, tokens, walk

families = pytest.mark.parametrize("family", ["qwen3", *HYBRIDS, *LATENT])


def _pages(segment: Segment) -> list[Tensor]:
    layers = range(len(segment.layers))
    pages = [page for layer in layers for page in segment.resident(layer)]
    return [t for page in pages for t in page if t is not None]


def _captured(one: GroupWalk, prompt: Tensor) -> Segment:
    return one.captured(prompt, PromptKey(b"", 0), Meter())


class _Kept:
    """A tensor saved for a backward; goes when the part of the graph that saved it goes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Saved:
    """Bytes saved for a backward, by distinct storage, without weights and resident state."""

    def __init__(self, one: GroupWalk) -> None:
        self._one = one
        self._live: WeakSet[_Kept] = WeakSet()

    def __enter__(self) -> _Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.x)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)  # type: ignore[arg-type]

    def _pack(self, x: Tensor) -> _Kept:
        kept = _Kept(x)
        self._live.add(kept)
        return kept

    def bytes(self) -> int:
        kept = [p for p in self._one.model.module.parameters()]
        kept += [t for s in self._one.store._states.values() for t in _pages(s)]
        known = {t.untyped_storage().data_ptr() for t in kept}
        saved = {s.data_ptr(): s.nbytes() for s in (k.x.untyped_storage() for k in self._live)}
        return sum(size for place, size in saved.items() if place not in known)


def _bytes_saved(prompt: int, lengths: list[int], family: str = "qwen3") -> int:
    """Most bytes saved by one row's graph."""
    one = walk(model(family), chunk_tokens=64, page_tokens=64)
    groups, objective = one_group(prompt, lengths)
    most = [0]

    def on_row(row: Row, out: LogProbs) -> None:
        most[0] = max(most[0], saved.bytes())
        objective.loss(row, out).backward()

    with _Saved(one) as saved:
        _batch_run(one, on_row).run(groups)
    return most[0]


def _batch_run(one: GroupWalk, on_row: Callable[[Row, LogProbs], None]) -> BatchRun:
    return BatchRun(
        one,
        Meter(),
        Lockstep(),
        key=lambda group: PromptKey(group.digest, 0),
        temperature=lambda _: 1.0,
        on_row=on_row,
        entropy=True,
    )


@families
def test_saved_bytes_do_not_grow_with_the_prompt(family: str) -> None:
    assert _bytes_saved(20, [8], family) == _bytes_saved(600, [8], family) > 0


@families
def test_saved_bytes_do_not_grow_with_the_group(family: str) -> None:
    assert _bytes_saved(50, [8, 8], family) == _bytes_saved(50, [8] * 8, family)


def test_saved_bytes_grow_with_the_response() -> None:
    assert _bytes_saved(50, [64]) > 4 * _bytes_saved(50, [8])


def test_capture_leaves_no_graph() -> None:
    segment = _captured(walk(model()), tokens(40, 1))
    assert segment.length == 39
    assert not any(t.requires_grad for t in _pages(segment))


def test_replay_and_backward_leave_the_state_as_it_was() -> None:
    one = walk(model())
    groups, objective = one_group(40, [9, 1, 3])
    replay_batch(one, groups, objective)
    (segment,) = one.store._states.values()
    before = [t.clone() for t in _pages(segment)]
    replay_batch(one, groups, objective)
    assert (segment.length, segment.stop) == (39, 39)
    assert all(torch.equal(a, b) for a, b in zip(_pages(segment), before, strict=True))


def test_decode_leaves_the_state_as_it_was() -> None:
    one = walk(model())
    prompt = tokens(40, 1)
    segment = _captured(one, prompt)
    before, size = [t.clone() for t in _pages(segment)], segment.nbytes
    samplings = [Sampling(max_new_tokens=n) for n in (5, 12)]
    generator = torch.Generator().manual_seed(0)
    decode(one.model, segment, prompt, samplings, generator=generator, lockstep=Lockstep())
    assert (segment.length, segment.nbytes) == (39, size)
    assert all(torch.equal(a, b) for a, b in zip(_pages(segment), before, strict=True))


@pytest.mark.parametrize("gradient", ["response_only", "exact"])
def test_a_failed_row_leaves_the_state_usable(gradient: Gradient) -> None:
    one = walk(model(), gradient=gradient)
    groups, objective = one_group(40, [9, 5])
    expected = replay_batch(walk(model(), gradient=gradient), groups, objective)

    def fail(row: Row, out: LogProbs) -> None:
        objective.loss(row, out).backward()
        if row.index == 1:
            raise RuntimeError("loss function failed")

    with pytest.raises(RuntimeError, match="loss"):
        _batch_run(one, fail).run(groups)
    one.model.module.zero_grad(set_to_none=True)
    again = replay_batch(one, groups, objective)
    assert bitwise_equal(again.rows, expected.rows)
    for name, gradient_ in expected.gradients.items():
        assert torch.equal(again.gradients[name], gradient_), name
