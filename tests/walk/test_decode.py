"""Decoding on a branch: against Hugging Face's generate, and against scoring."""

from __future__ import annotations

import pytest
import torch

from longstraw_backend.groups import prompt_digest
from longstraw_backend.parallel import Lockstep
from longstraw_backend.state import PromptKey
from longstraw_backend.tiny import AVAILABLE
from longstraw_backend.walk import GroupWalk, Meter, Sample, Sampling, generate
from tests.walk.cases import LATENT, log_probs, model, tokens, walk

PROMPT = tokens(37, seed=5)


def _generate(one: GroupWalk, samplings: list[Sampling], seed: int = 0) -> list[Sample]:
    return generate(
        one, PROMPT, lambda digest: PromptKey(digest, 0), samplings, seed, Meter(), Lockstep()
    )


@pytest.mark.parametrize("family", sorted(set(AVAILABLE) - set(LATENT)))
def test_greedy_equals_generate(family: str) -> None:
    stock = model(family)
    expected = stock.generate(PROMPT[None], max_new_tokens=12, do_sample=False, eos_token_id=None)
    (sample,) = _generate(walk(stock), [Sampling(max_new_tokens=12, temperature=0)])
    assert sample.token_ids == expected[0, PROMPT.numel() :].tolist()
    assert sample.stop_reason == "length"


@pytest.mark.parametrize("family", AVAILABLE)
def test_sampled_log_probs_equal_scores(family: str) -> None:
    one = walk(model(family, torch.float32))
    samplings = [
        Sampling(max_new_tokens=n, temperature=t) for n, t in ((12, 1.0), (7, 0.7), (1, 1))
    ]
    samples = _generate(one, samplings)
    segment = one.store.get(PromptKey(prompt_digest(PROMPT), 0))
    assert segment is not None
    for sample, sampling in zip(samples, samplings, strict=True):
        assert len(sample.token_ids) == sampling.max_new_tokens
        response = torch.tensor(sample.token_ids)
        scored = log_probs(one, segment, PROMPT, response, temperature=sampling.temperature)
        assert torch.allclose(scored, torch.tensor(sample.log_probs), rtol=0, atol=1e-5)


def test_rollout_and_scoring_share_one_capture() -> None:
    one, meter = walk(model()), Meter()
    _generate(one, [Sampling(max_new_tokens=2)])
    one.captured(PROMPT, PromptKey(prompt_digest(PROMPT), 0), meter)
    assert meter.prompt_tokens_captured == 0


def test_same_seed_draws_the_same() -> None:
    one = walk(model())
    samplings = [Sampling(max_new_tokens=10)] * 3
    first, again, other = (_generate(one, samplings, seed) for seed in (4, 4, 5))
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert [s.token_ids for s in first] != [s.token_ids for s in other]
    assert len({tuple(s.token_ids) for s in first}) == 3


def test_stops_at_the_end_token_and_keeps_it() -> None:
    one = walk(model())
    (free,) = _generate(one, [Sampling(max_new_tokens=12, temperature=0)])
    end = free.token_ids[4]
    stopping = Sampling(max_new_tokens=12, temperature=0, eos_token_ids=(end,))
    (stopped,) = _generate(one, [stopping])
    place = free.token_ids.index(end)
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert stopped.stop_reason == "stop"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_bad_sampling_names_the_option(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**({"max_new_tokens": 1} | options))  # type: ignore[arg-type]
