"""Decoding with a stock module equals reading the full forward pass."""

import pytest
import torch

from longstraw_backend.tiny import tiny_model
from longstraw_backend.walk.decode import Sampling
from longstraw_backend.workers.verl.rollout_model import generate_with_stock_module

PROMPT = [5, 17, 99, 4, 250, 31]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def full_log_probs(model, response, temperature):
    """Log-probs of the response from one forward over prompt and response."""
    ids = torch.tensor([PROMPT + response])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(PROMPT) - 1 : -1].float() / temperature
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_log_probs_are_those_of_the_full_forward(model):
    samplings = [Sampling(9, temperature=0.7), Sampling(4), Sampling(9)]
    for sampling, sample in zip(
        samplings, generate_with_stock_module(model, PROMPT, samplings, seed=1), strict=True
    ):
        assert len(sample.token_ids) == sampling.max_new_tokens
        assert sample.stop_reason == "length"
        torch.testing.assert_close(
            torch.tensor(sample.log_probs),
            full_log_probs(model, sample.token_ids, sampling.temperature),
            atol=1e-5,
            rtol=0,
        )


def test_greedy_follows_the_arg_max(model):
    [sample] = generate_with_stock_module(model, PROMPT, [Sampling(6, temperature=0)], seed=0)
    ids = list(PROMPT)
    for token in sample.token_ids:
        with torch.no_grad():
            assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


def test_end_token_ends_its_row_alone(model):
    plain = generate_with_stock_module(model, PROMPT, [Sampling(8)] * 2, seed=3)
    end = plain[0].token_ids[2]
    if end in plain[1].token_ids[:3]:
        pytest.skip("both rows drew the same token")
    ended, other = generate_with_stock_module(
        model, PROMPT, [Sampling(8, eos_token_ids=(end,)), Sampling(8)], seed=3
    )
    assert ended.token_ids == plain[0].token_ids[: plain[0].token_ids.index(end) + 1]
    assert ended.stop_reason == "stop"
    assert other == plain[1]


def test_same_seed_same_responses(model):
    first, second, third = (
        generate_with_stock_module(model, PROMPT, [Sampling(8)] * 2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != third


def test_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="0 tokens"):
        generate_with_stock_module(model, [], [Sampling(1)], seed=0)
