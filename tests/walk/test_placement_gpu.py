"""Whole tiny models on a CUDA device whose prompt state rests in pinned CPU memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw_backend.compare.distances import bitwise_equal, gradient_rel_l2
from longstraw_backend.compare.sides import score_batch
from longstraw_backend.kernels.staging import STAGINGS
from longstraw_backend.oracle import Outcome
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import (
    STATE_KINDS,
    KVPages,
    Placement,
    PromptKey,
    RecurrentState,
    Segment,
)
from longstraw_backend.state.placement import bytes_of
from longstraw_backend.tiny import AVAILABLE
from longstraw_backend.walk import GroupWalk, Meter, Sampling, decode
from tests.walk.cases import model, one_group, ours, tokens, walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# 16-bit delta rules need flash-linear-attention, so hybrids run in float32.
MODELS = [(family, torch.float32) for family in AVAILABLE] + [("qwen3", torch.bfloat16)]
BAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of gradients that differ from run to run on the device too."""
each_model = pytest.mark.parametrize(("family", "dtype"), MODELS)
SIZES: dict[str, Any] = {"chunk_tokens": 64, "page_tokens": 50}
BATCH = one_group(300, [33, 1, 70])


def built(family: str, dtype: torch.dtype, **options: Any) -> GroupWalk:
    return walk(model(family, dtype).to("cuda"), **(SIZES | options))


def outcome(family: str, dtype: torch.dtype, **options: Any) -> Outcome:
    return ours(model(family, dtype).to("cuda"), *BATCH, **(SIZES | options))


def captured(one: GroupWalk) -> Segment:
    return one.captured(tokens(300, 1), PromptKey(b"", 0), Meter())


@each_model
@pytest.mark.parametrize("mode", STAGINGS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_state_on_the_host_changes_no_bit(
    family: str, dtype: torch.dtype, mode: str, checkpointing: bool
) -> None:
    options: dict[str, Any] = {"activation_checkpointing": checkpointing}
    run, again = (outcome(family, dtype, **options) for _ in range(2))
    found = outcome(family, dtype, host_state=STATE_KINDS, staging=mode, **options)
    assert bitwise_equal(run.rows, again.rows) and bitwise_equal(found.rows, run.rows)
    if all(torch.equal(g, again.gradients[name]) for name, g in run.gradients.items()):
        assert all(torch.equal(g, found.gradients[name]) for name, g in run.gradients.items())
    assert gradient_rel_l2(found.gradients, run.gradients) <= BAR[dtype]
    scored = score_batch(built(family, dtype, host_state=STATE_KINDS, staging=mode), *BATCH)
    assert bitwise_equal(scored, found.rows)


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_kind_moves_alone(kind: Any) -> None:
    run = outcome("qwen3_5", torch.float32)
    assert bitwise_equal(outcome("qwen3_5", torch.float32, host_state=[kind]).rows, run.rows)
    segment = captured(built("qwen3_5", torch.float32, host_state=[kind]))
    torch.cuda.synchronize()
    for i, layer in enumerate(segment.layers):
        held = [t for piece in segment.resident(i) for t in piece]
        assert all(t.is_pinned() != t.is_cuda for t in held)
        assert all(t.is_pinned() == (layer.kind == kind) for t in held)
    assert segment.host_nbytes == sum(x.nbytes for x in segment.layers if x.kind == kind)


@each_model
def test_all_state_is_pinned_and_equal(family: str, dtype: torch.dtype) -> None:
    here = captured(built(family, dtype))
    there = captured(built(family, dtype, host_state=STATE_KINDS))
    torch.cuda.synchronize()
    assert here.host_nbytes == 0 and there.host_nbytes == there.nbytes >= here.nbytes
    for layer in range(len(here.layers)):
        for a, b in zip(here.resident(layer), there.resident(layer), strict=True):
            for x, y in zip(a, b, strict=True):
                if x is not None:  # layers without an indexer have no index keys
                    assert x.is_cuda and y.is_pinned() and torch.equal(x.cpu(), y)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_decoding_over_state_on_the_host(family: str) -> None:
    drawn = []
    for host in ((), STATE_KINDS):
        one = built(family, torch.float32, host_state=host)
        samplings = [Sampling(max_new_tokens=n) for n in (12, 5)]
        generator = torch.Generator("cuda").manual_seed(0)
        where: dict[str, Any] = dict(generator=generator, lockstep=Lockstep())
        samples = decode(one.model, captured(one), tokens(300, 1), samplings, **where)
        drawn.append([(s.token_ids, s.log_probs) for s in samples])
    assert drawn[0] == drawn[1]


def test_writes_to_pinned_pages_do_not_wait_and_are_whole() -> None:
    """Strided in and out: keys as a model leaves them, pages across whose borders they lie."""
    placement = Placement(frozenset({"attention"}))
    here, there = KVPages(1000, 300), KVPages(1000, 300, placement)
    new = torch.randn(1, 1000, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for start, stop in ((0, 250), (250, 251), (251, 950), (950, 1000)):
        torch.cuda._sleep(5_000_000)
        for pages in (here, there):
            pages.write(start, new[:, :, start:stop], -new[:, :, start:stop])
    torch.cuda.synchronize()
    for a, b in zip(here.visible(970), there.visible(970), strict=True):
        assert torch.equal(a.k.cpu(), b.k) and torch.equal(a.v.cpu(), b.v) and b.k.is_pinned()


def test_pinned_memory_counts_in_powers_of_two() -> None:
    state = RecurrentState(placement=Placement(frozenset({"recurrent"})))
    state.write(0, *(torch.ones(1, 3, 100, device="cuda") for _ in range(2)))
    state.commit(1, 1)
    assert state.nbytes == 2 * 2048 and bytes_of(state.visible(1)[0].conv) == 2048
