"""Walks over prompt state that rests in CPU memory, copied as if to another device: same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw_backend.compare.distances import bitwise_equal
from longstraw_backend.compare.sides import replay_batch, score_batch
from longstraw_backend.kernels import staging
from longstraw_backend.kernels.staging import STAGINGS
from longstraw_backend.oracle import Outcome
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import STATE_KINDS, PromptKey
from longstraw_backend.tiny import AVAILABLE
from longstraw_backend.walk import GroupWalk, Meter, Sampling, decode
from tests.walk.cases import model, one_group, ours, tokens, walk

ALL = {"host_state": STATE_KINDS}


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as being on the device."""
    monkeypatch.setattr(staging, "away", lambda x, device: True)


def outcome(family: str, **options: Any) -> Outcome:
    return ours(model(family, torch.float32), *one_group(40, [9, 1, 4]), **options)


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert bitwise_equal(found.rows, expected.rows)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize("mode", STAGINGS)
@pytest.mark.parametrize("family", AVAILABLE)
def test_state_on_the_host_changes_no_bit(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcome(family)
    monkeypatch.setattr(staging, "away", lambda x, device: True)
    assert_same(outcome(family, staging=mode, **ALL), expected)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_score_equals_replay_bitwise_with_recomputation(family: str, copying: None) -> None:
    groups, objective = one_group(40, [9, 1])
    one = walk(model(family, torch.float32), activation_checkpointing=True, **ALL)
    before = score_batch(one, groups, objective)
    assert bitwise_equal(before, replay_batch(one, groups, objective).rows)


def _decoded(one: GroupWalk) -> list[list[int]]:
    prompt = tokens(40, 1)
    segment = one.captured(prompt, PromptKey(b"", 0), Meter())
    samplings = [Sampling(max_new_tokens=n) for n in (5, 2)]
    generator = torch.Generator().manual_seed(0)
    found = decode(one.model, segment, prompt, samplings, generator=generator, lockstep=Lockstep())
    return [sample.token_ids for sample in found]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_decoding_over_state_on_the_host(family: str, copying: None) -> None:
    assert _decoded(walk(model(family), **ALL)) == _decoded(walk(model(family)))


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_kind_moves_alone(kind: str) -> None:
    one = walk(model("qwen3_5"), host_state=[kind])
    segment = one.captured(tokens(40, 1), PromptKey(b"", 0), Meter())
    moved = sum(layer.nbytes for layer in segment.layers if layer.kind == kind)
    assert 0 < segment.host_nbytes == moved < segment.nbytes
    assert one.store.host_nbytes == moved
