"""Sampling against a row-by-row reference in plain Python floats."""

import math
from dataclasses import dataclass

import pytest
import torch

from longstraw_backend.kernels.sampling import filtered_log_probs, sample_tokens


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


MIXED = [
    Params(),
    Params(temperature=0.5),
    Params(temperature=0.0),
    Params(top_k=3),
    Params(top_p=0.6),
    Params(temperature=1.7, top_k=8, top_p=0.8),
    Params(top_k=-1, top_p=1.0),
    Params(top_k=1),
    Params(top_p=1e-6),
]


def reference_row(logits: list[float], params: Params) -> list[float]:
    """Probabilities by the definition: scale, keep the k best, keep the smallest mass >= p."""
    if params.temperature == 0:
        best = max(range(len(logits)), key=lambda i: logits[i])
        return [1.0 if i == best else 0.0 for i in range(len(logits))]
    weights = [math.exp(x / params.temperature) for x in logits]
    kept = set(range(len(logits)))
    if params.top_k > 0:
        bound = sorted(logits, reverse=True)[params.top_k - 1]
        kept = {i for i in kept if logits[i] >= bound}
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in sorted(kept, key=lambda i: -logits[i]):
        if mass >= params.top_p and params.top_p < 1 and nucleus:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def random_logits(rows: int, vocabulary: int = 23) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 2


def test_matches_the_definition_row_by_row():
    logits_BV = random_logits(len(MIXED))
    got_BV = filtered_log_probs(logits_BV, MIXED).exp()
    want_BV = torch.tensor(
        [reference_row(row.tolist(), p) for row, p in zip(logits_BV, MIXED, strict=True)]
    )
    torch.testing.assert_close(got_BV, want_BV, atol=1e-6, rtol=0)


def test_ties_at_the_kth_place_stay():
    logits_BV = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    got_BV = filtered_log_probs(logits_BV, [Params(top_k=2)]).exp()
    assert (got_BV > 0).tolist() == [[True, True, True, False]]


def test_reported_log_prob_is_that_of_the_drawn_token():
    logits_BV = random_logits(len(MIXED))
    tokens_B, log_probs_B = sample_tokens(logits_BV, MIXED, torch.Generator().manual_seed(0))
    want_B = filtered_log_probs(logits_BV, MIXED).gather(-1, tokens_B[:, None])[:, 0]
    assert torch.equal(log_probs_B, want_B)
    assert torch.isfinite(log_probs_B).all()


def test_greedy_row_takes_the_best_token_with_certainty():
    logits_BV = random_logits(2)
    tokens_B, log_probs_B = sample_tokens(logits_BV, [Params(temperature=0)] * 2)
    assert torch.equal(tokens_B, logits_BV.argmax(-1))
    assert log_probs_B.tolist() == [0.0, 0.0]


def test_frequencies_follow_the_filtered_distribution():
    draws = 20_000
    params = Params(temperature=0.8, top_k=6, top_p=0.9)
    logits_BV = random_logits(1).expand(draws, -1)
    tokens_B, _ = sample_tokens(logits_BV, [params] * draws, torch.Generator().manual_seed(1))
    counts_V = torch.bincount(tokens_B, minlength=logits_BV.shape[-1]) / draws
    want_V = torch.tensor(reference_row(logits_BV[0].tolist(), params))
    # Five standard deviations of a binomial share at its widest.
    assert (counts_V - want_V).abs().max() < 5 * 0.5 / math.sqrt(draws)


def test_same_seed_gives_the_same_tokens():
    logits_BV = random_logits(5)
    first, second = (
        sample_tokens(logits_BV, [Params()] * 5, torch.Generator().manual_seed(7))[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_half_precision_logits_are_scored_in_fp32():
    logits_BV = random_logits(2).bfloat16()
    got_BV = filtered_log_probs(logits_BV, [Params()] * 2)
    assert got_BV.dtype == torch.float32
    torch.testing.assert_close(got_BV, logits_BV.float().log_softmax(-1))


def test_vocabulary_smaller_than_k_keeps_everything():
    logits_BV = random_logits(1, vocabulary=4)
    got_BV = filtered_log_probs(logits_BV, [Params(top_k=50)])
    torch.testing.assert_close(got_BV, logits_BV.log_softmax(-1))


@pytest.mark.parametrize("params", [Params(temperature=-1), Params(top_p=0), Params(top_p=1.1)])
def test_parameters_out_of_range_are_refused(params):
    with pytest.raises(ValueError, match="temperature must be >= 0 and top_p in"):
        sample_tokens(random_logits(1), [params])


def test_wrong_number_of_samplings_is_refused():
    with pytest.raises(ValueError, match="one row per sampling"):
        sample_tokens(random_logits(2), [Params()])
