"""Predicted bytes: exact for state and parameters, within bounds for activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longstraw_backend.bench.capture import last_chunk
from longstraw_backend.bench.planner import largest_context, plan_of
from longstraw_backend.bench.replay import one_response, random_state
from longstraw_backend.bench.shapes import config_of
from longstraw_backend.bench.watched import transient_peak
from longstraw_backend.models.sizes import ModelSizes
from longstraw_backend.tiny import AVAILABLE

from .small import small_settings, subject_of

FAMILIES = [f for f in ("qwen3", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v3") if f in AVAILABLE]


@pytest.mark.parametrize("gradient", ["response_only", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_predicted_to_the_byte(family: str, gradient: Any) -> None:
    settings = small_settings("replay", family, gradient=gradient)
    subject = subject_of(settings)
    segment = random_state(subject, settings.length)
    recurrent = [layer for layer in segment.layers if layer.kind == "recurrent"]
    one = sum(layer.nbytes for layer in recurrent) // (4 if gradient == "exact" else 1)
    assert subject.plan(settings.length).state == segment.nbytes + one  # the one being written


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_predicted_to_the_byte(family: str, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    subject = subject_of(small_settings(family=family, lora=lora))
    module = subject.model.module
    frozen = [b for name, b in module.named_buffers() if "weights_proj" in name]  # of the indexer
    here = sum(x.nbytes for x in [*module.parameters(), *frozen])
    assert subject.plan(256).weights == here


@pytest.mark.parametrize(
    ("shape", "layers", "dtype"), [("qwen3.5-0.8b", 4, "bfloat16"), ("qwen3-8b", 1, "float32")]
)
def test_activations_are_predicted_at_published_widths(shape: str, layers: int, dtype: Any) -> None:
    """Bounds: seen here 0.89 to 1.33; the sum of a graph and of the most beside it is an upper one,
    the few tensors of a norm or a rotation are left out."""
    options: dict[str, Any] = dict(layers=layers, vocab=1000, dtype=dtype, page_tokens=256)
    settings = small_settings("replay", shape=shape, chunk=128, response=128, **options)
    subject = subject_of(settings)
    segment = random_state(subject, settings.length)
    plan, device = subject.plan(settings.length), torch.device("cpu")
    replay = one_response(subject, segment, subject.response(0))
    replay()
    for predicted, work in ((plan.capture, last_chunk(subject, segment)), (plan.replay, replay)):
        measured = transient_peak(work, device)
        assert measured is not None and 0.85 <= predicted / measured <= 1.4


def test_only_state_grows_with_the_prompt() -> None:
    config = config_of("qwen3.6-27b")
    sizes, settings = ModelSizes.of(config), small_settings(device="cuda", lora=16)
    short, long = (plan_of(config, sizes, settings, n).as_json() for n in (1 << 18, 1 << 21))
    assert {k for k in short if short[k] != long[k] and not k.startswith("peak")} == {"state"}


def test_the_longest_prompt_fits_and_one_chunk_more_does_not() -> None:
    config = config_of("qwen3.6-27b")
    sizes, settings = ModelSizes.of(config), small_settings(device="cuda", chunk=8192, lora=16)
    longest = largest_context(config, sizes, settings, "replay")
    assert longest is not None
    peaks = [plan_of(config, sizes, settings, n).peak("replay") for n in (longest, longest + 8192)]
    assert peaks[0] <= settings.budget_gb * 2**30 < peaks[1]
    assert largest_context(config, sizes, replace(settings, budget_gb=1.0), "replay") == 0


def test_offloaded_state_is_told_apart() -> None:
    config = config_of("qwen3.6-27b")
    sizes, settings = ModelSizes.of(config), small_settings(device="cuda")
    here = plan_of(config, sizes, settings, 1 << 20)
    away = plan_of(config, sizes, replace(settings, offload=("attention",)), 1 << 20)
    assert away.state + away.host == here.state + here.host
    assert away.state < here.state and away.capture > here.capture  # rooms for two pages


def test_any_prompt_fits_whose_state_rests_in_cpu_memory() -> None:
    config = config_of("qwen3.6-27b")
    settings = small_settings(device="cuda", chunk=8192, lora=16, offload=("attention",))
    assert largest_context(config, ModelSizes.of(config), settings, "capture") is None
