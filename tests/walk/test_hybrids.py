"""Gated-delta-net hybrids: what dense families don't have in a walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw_backend.compare.distances import gradient_rel_l2
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey, Segment
from longstraw_backend.walk import Meter, Sampling, decode
from tests.walk.cases import (
    HYBRIDS,
    check,
    chunk_peak,
    log_probs,
    model,
    one_group,
    ours,
    theirs,
    tokens,
    walk,
)

LINEAR, FULL = "linear_attention", "full_attention"
PATTERNS = {
    "published": [LINEAR, LINEAR, LINEAR, FULL],
    "attention first": [FULL, LINEAR],
    "no attention": [LINEAR, LINEAR],
    "no delta net": [FULL, FULL],
}
families = pytest.mark.parametrize("family", HYBRIDS)


@families
@pytest.mark.parametrize("pattern", PATTERNS)
def test_layer_patterns(family: str, pattern: str) -> None:
    layers = PATTERNS[pattern]
    options: dict[str, Any] = {"layer_types": layers, "num_hidden_layers": len(layers)}
    groups, objective = one_group(30, [7, 1])
    expected = theirs(model(family, **options), groups, objective)
    check(ours(model(family, **options), groups, objective), expected, family=family)


@families
@pytest.mark.parametrize("heads", [(2, 2), (1, 4)], ids=["as many", "four to one"])
def test_groups_of_value_heads(family: str, heads: tuple[int, int]) -> None:
    keys, values = heads
    options = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    groups, objective = one_group(30, [7, 1])
    expected = theirs(model(family, **options), groups, objective)
    check(ours(model(family, **options), groups, objective), expected, family=family)


@families
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5])
def test_prompts_shorter_than_the_convolution(family: str, prompt: int) -> None:
    groups, objective = one_group(prompt, [6, 1, 2])
    expected = theirs(model(family), groups, objective)
    check(ours(model(family), groups, objective), expected, family=family)


@families
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 65])
def test_chunks_do_not_matter(family: str, chunk: int) -> None:
    groups, objective = one_group(70, [9, 1])
    expected = theirs(model(family), groups, objective)
    found = ours(model(family), groups, objective, chunk_tokens=chunk)
    check(found, expected, family=family)


@families
def test_responses_longer_than_a_chunk_of_the_rule(family: str) -> None:
    groups, objective = one_group(20, [131, 64])
    expected = theirs(model(family), groups, objective)
    check(ours(model(family), groups, objective), expected, family=family)


@families
def test_gradient_is_not_that_of_full_sequence_training(family: str) -> None:
    groups, objective = one_group(30, [9, 4])
    full = theirs(model(family), groups, objective, "full")
    found = ours(model(family), groups, objective)
    assert gradient_rel_l2(found.gradients, full.gradients) > 0.01


def _values(segment: Segment) -> list[torch.Tensor]:
    return [t for layer in range(3) for piece in segment.resident(layer) for t in piece]


@families
def test_no_replay_or_decode_changes_the_boundary_state(family: str) -> None:
    one = walk(model(family, torch.float32))
    prompt = tokens(40, 1)
    segment = one.captured(prompt, PromptKey(b"", 0), Meter())
    before = [t.clone() for t in _values(segment)]
    outputs = []
    for length in (9, 1, 9):
        out = log_probs(one, segment, prompt, tokens(length, 3), grad=True)
        out.sum().backward()
        outputs.append(out.detach())
        samplings = [Sampling(max_new_tokens=n) for n in (5, 2)]
        generator = torch.Generator().manual_seed(0)
        decode(one.model, segment, prompt, samplings, generator=generator, lockstep=Lockstep())
        assert all(torch.equal(a, b) for a, b in zip(_values(segment), before, strict=True))
    assert torch.equal(outputs[0], outputs[2])
    assert not any(t.requires_grad for t in _values(segment))


def test_state_is_float32_in_a_16_bit_model_and_float64_in_a_float64_one() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        one = walk(model("qwen3_5", dtype))
        segment = one.captured(tokens(9, 1), PromptKey(b"", 0), Meter())
        (state,) = segment.resident(0)
        assert (state.conv.dtype, state.recurrent.dtype) == (dtype, wide)


def _state_bytes(config: Any, prompt: int, item: int = 4) -> int:
    """By the formula: pages of attention layers per token, constants of the others."""
    full = config.layer_types.count(FULL)
    linear = config.layer_types.count(LINEAR)
    per_token = full * 2 * config.num_key_value_heads * config.head_dim * item
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * (config.linear_conv_kernel_dim - 1) * item
    recurrent = values * config.linear_key_head_dim * 4
    return (prompt - 1) * per_token + linear * (conv + recurrent)


@families
@pytest.mark.parametrize("prompt", [2, 40, 333])
def test_state_has_the_bytes_of_the_formula(family: str, prompt: int) -> None:
    stock: Any = model(family, torch.float32)
    segment = walk(stock).captured(tokens(prompt, 1), PromptKey(b"", 0), Meter())
    assert segment.nbytes == _state_bytes(stock.config, prompt)


@families
def test_peak_memory_of_a_chunk_does_not_grow_with_the_prompt(family: str) -> None:
    driven = walk(model(family, torch.float32)).model
    short, long = (chunk_peak(driven, prompt, 64) for prompt in (512, 4096))
    assert long <= 1.005 * short
