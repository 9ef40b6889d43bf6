"""verl's request options become ours, or are refused by name."""

import pytest

from longstraw_backend.walk.decode import Sampling
from longstraw_backend.workers.verl.rollout_requests import (
    Limits,
    read_sampling,
    refuse_media,
    wants_log_probs,
)

LIMITS = Limits(response_length=20, max_model_len=None, eos_token_ids=(2, 5))
# What verl's agent-loop worker sends for training and for validation.
TRAINING = dict(temperature=0.7, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True)
VALIDATION = dict(temperature=0, top_p=1.0, top_k=-1, repetition_penalty=1.0, logprobs=True)


def test_training_options_are_honoured():
    assert read_sampling(TRAINING, 100, LIMITS) == Sampling(
        max_new_tokens=20, temperature=0.7, top_p=0.9, top_k=-1, eos_token_ids=(2, 5)
    )


def test_validation_is_greedy_by_default():
    assert read_sampling(VALIDATION, 100, LIMITS).temperature == 0


def test_do_sample_false_is_greedy_whatever_the_temperature():
    assert read_sampling({"do_sample": False, "temperature": 0.7}, 1, LIMITS).temperature == 0


def test_ignored_end_token_does_not_end():
    assert read_sampling({"ignore_eos": True}, 1, LIMITS).eos_token_ids == ()


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_wish_for_fewer_tokens_is_honoured_within_the_response_length(name):
    assert read_sampling({name: 3}, 1, LIMITS).max_new_tokens == 3
    assert read_sampling({name: 300}, 1, LIMITS).max_new_tokens == 20


def test_model_length_bounds_the_response():
    limits = Limits(20, max_model_len=110, eos_token_ids=())
    assert read_sampling({}, 100, limits).max_new_tokens == 10


def test_prompt_without_room_is_refused():
    limits = Limits(20, max_model_len=100, eos_token_ids=())
    with pytest.raises(ValueError, match=r"max_model_len=100 .* 100 tokens.*at least 120"):
        read_sampling({}, 100, limits)


@pytest.mark.parametrize(
    ("option", "value"),
    [("repetition_penalty", 1.1), ("min_p", 0.1), ("n", 2), ("guided_json", {}), ("stop", ["x"])],
)
def test_option_that_would_change_the_distribution_is_refused(option, value):
    with pytest.raises(ValueError, match=f"{option}="):
        read_sampling(TRAINING | {option: value}, 1, LIMITS)


def test_option_at_its_neutral_value_is_ignored():
    read_sampling(TRAINING | {"min_p": 0.0, "stop": None, "n": 1}, 1, LIMITS)


def test_log_probs_of_alternatives_are_refused():
    assert wants_log_probs({"logprobs": True}) and wants_log_probs({"logprobs": 0})
    assert not wants_log_probs({"logprobs": False}) and not wants_log_probs({})
    with pytest.raises(ValueError, match="got 5"):
        wants_log_probs({"logprobs": 5})


def test_media_are_refused_and_their_absence_is_not():
    refuse_media({"images": None, "videos": [], "audio": None})
    with pytest.raises(ValueError, match="images, videos"):
        refuse_media({"images": [object()], "videos": [object()], "audio": None})
