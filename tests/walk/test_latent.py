"""Latent attention, sparse and dense: what other families don't have in a walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.compare.distances import gradient_rel_l2
from longstraw_backend.groups import prompt_digest
from longstraw_backend.kernels.index_topk import api, scores
from longstraw_backend.models import DrivenModel, Walk
from longstraw_backend.oracle_latent import latent_attentions
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey, Segment
from longstraw_backend.walk import GroupWalk, Meter, Sampling, generate
from tests.walk.cases import (
    LATENT,
    VOCAB,
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

families = pytest.mark.parametrize("family", LATENT)
PATTERNS: dict[str, dict[str, Any]] = {
    "all full": {"index_topk_freq": 1},
    "FSSF": {"index_topk_pattern": "FSSF"},
    "one for all": {"indexer_types": ["full"] + ["shared"] * 3},
    "wide top-k": {"index_topk": 31},
    "one token": {"index_topk": 1},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_selection(pattern: str) -> None:
    options = PATTERNS[pattern]
    groups, objective = one_group(40, [9, 1])
    expected = theirs(model("glm_moe_dsa", **options), groups, objective)
    check(ours(model("glm_moe_dsa", **options), groups, objective), expected)


@families
@pytest.mark.parametrize("prompt", [1, 2, 5, 12, 13])
def test_prompts_no_longer_than_the_selection(family: str, prompt: int) -> None:
    groups, objective = one_group(prompt, [6, 1, 2])
    expected = theirs(model(family), groups, objective)
    check(ours(model(family), groups, objective), expected)


@families
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_do_not_matter(family: str, chunk: int) -> None:
    groups, objective = one_group(70, [9, 1])
    expected = theirs(model(family), groups, objective)
    check(ours(model(family), groups, objective, chunk_tokens=chunk), expected)


@families
def test_gradient_is_not_that_of_full_sequence_training(family: str) -> None:
    groups, objective = one_group(30, [9, 4])
    full = theirs(model(family), groups, objective, "full")
    found = ours(model(family), groups, objective)
    assert gradient_rel_l2(found.gradients, full.gradients) > 0.01


@families
def test_no_gradient_reaches_an_indexer(family: str) -> None:
    found = ours(model(family), *one_group(30, [9, 4])).gradients
    assert "model.layers.0.self_attn.kv_b_proj.weight" in found
    assert not any("indexer" in name for name in found)


@pytest.mark.parametrize("pattern", ["all full", "FSSF"])
def test_a_recomputed_layer_selects_only_once(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def counted(*args: Any) -> Tensor:
        calls[0] += 1
        return scores.block_scores(*args)

    monkeypatch.setattr(api, "block_scores", counted)
    made = []
    for checkpointing in (False, True):
        calls[0] = 0
        stock = model("glm_moe_dsa", **PATTERNS[pattern])
        ours(stock, *one_group(30, [9]), activation_checkpointing=checkpointing)
        made.append(calls[0])
    assert made[0] == made[1] > 0


@families
def test_greedy_decoding_follows_the_ordinary_forward(family: str) -> None:
    stock, prompt = model(family), tokens(37, 5)
    path = prompt
    with torch.no_grad(), latent_attentions(stock, None):
        for _ in range(12):
            path = torch.cat([path, stock(input_ids=path[None]).logits[0, -1:].argmax(-1)])
    one, sampling = walk(stock), Sampling(max_new_tokens=12, temperature=0)
    key = PromptKey(prompt_digest(prompt), 0)
    (sample,) = generate(one, prompt, lambda _: key, [sampling], 0, Meter(), Lockstep())
    assert sample.token_ids == path[37:].tolist()


def _state_bytes(config: Any, prompt: int, item: int = 4) -> int:
    """By the formula: a latent with its rotated key a layer, an index key a layer that selects."""
    full = [i for i in range(4) if i in (0, 1, 3) or config.model_type == "deepseek_v32"]
    index = len(full) * config.index_head_dim if hasattr(config, "index_head_dim") else 0
    latent = 4 * (config.kv_lora_rank + config.qk_rope_head_dim)
    return (prompt - 1) * (latent + index) * item


@families
@pytest.mark.parametrize("prompt", [2, 40, 333])
def test_state_has_the_bytes_of_the_formula(family: str, prompt: int) -> None:
    stock: Any = model(family, torch.float32)
    segment = walk(stock).captured(tokens(prompt, 1), PromptKey(b"", 0), Meter())
    assert segment.nbytes == _state_bytes(stock.config, prompt)


@families
def test_peak_memory_of_a_chunk_does_not_grow_with_the_prompt(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "KEY_BLOCK", 64)  # so that blocks are full at either length
    driven = walk(model(family, torch.float32)).model
    short, long = (chunk_peak(driven, prompt, 64) for prompt in (1024, 2048))
    assert long <= 1.005 * short


# --- the selection is global and causal -----------------------------------------------------------


def _log_probs(one: GroupWalk, path: Tensor, prompt: int) -> Tensor:
    """Of the tokens after a prompt."""
    one.store.clear()
    segment = one.captured(path[:prompt], PromptKey(b"", 0), Meter())
    return log_probs(one, segment, path[:prompt], path[prompt:])


@families
def test_the_last_token_changes_no_log_prob_before_it(family: str) -> None:
    one, path = walk(model(family)), tokens(120, 4)
    before = _log_probs(one, path, 90)
    path[-2] = (path[-2] + 1) % VOCAB  # the last one that is an input
    after = _log_probs(one, path, 90)
    # an expert that gets one token more or less rounds the others' last bits another way
    assert torch.allclose(before[:-2], after[:-2], rtol=0, atol=1e-12)
    assert (before[-1] - after[-1]).abs() > 1e-6


@pytest.mark.parametrize("far", [0, 31, 32, 200])
def test_a_planted_key_far_back_is_selected_from_everywhere(far: int) -> None:
    stock: Any = model("glm_moe_dsa", index_topk=4)
    planted, path = 7, tokens(300, 4)
    path[path == planted] = 8
    _plant(stock, planted)
    one = walk(stock, chunk_tokens=64, page_tokens=32)
    without = _log_probs(one, path, 260)
    path[far] = planted
    segment = one.model.segment(300, 32)
    for start, stop in ((0, 64), (64, 250), (250, 299), (299, 300)):
        (seen,) = (_selected(one.model, path[start:stop], segment) == far).any(-1)
        assert seen[max(0, far - start) :].all()
        assert not seen[: max(0, far - start)].any()
    assert ((_log_probs(one, path, 260) - without).abs() > 1e-6).all()


def _plant(stock: Any, planted: int) -> None:
    """Let the first indexer look for one direction, which is the embedding of one token."""
    direction, always = 0, 1  # dims of the hidden state: only that token's, and every token's
    embedding = stock.model.embed_tokens.weight.data
    embedding[:, direction], embedding[:, always] = 0.0, 1.0
    embedding[planted, direction] = 100.0
    attn = stock.model.layers[0].self_attn
    indexer, dim = attn.indexer, attn.config.qk_rope_head_dim  # the first without position
    for weight in (indexer.wq_b.weight, indexer.weights_proj.weight):
        weight.data.zero_()
    indexer.weights_proj.weight.data[:, always] = 1.0
    attn.q_a_proj.weight.data[0] = 0.0
    attn.q_a_proj.weight.data[0, always] = 1.0
    indexer.wq_b.weight.data.unflatten(0, (-1, attn.config.index_head_dim))[:, dim, 0] = 1.0
    indexer.wk.weight.data[dim, direction] = 10.0


def _selected(driven: DrivenModel, block: Tensor, segment: Segment) -> Tensor:
    """What the first layer selects for a block that is then committed, [1, T, K]."""
    call = Walk(segment, commit=True, head=None, tokens=block.numel())
    positions = torch.arange(segment.stop, segment.stop + block.numel())
    with torch.no_grad():
        driven.module(input_ids=block[None], position_ids=positions[None], longstraw=call)
    segment.commit(block.numel())
    return call.selections[0]
