"""Every knob's range, and building from a mapping."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.state import ON_DEVICE, Placement

KINDS = ("attention", "latent", "recurrent")


def test_defaults_are_valid() -> None:
    assert LongStrawConfig().gradient == "response_only"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient": "both"}, "gradient: expected one of ('response_only', 'exact'), got 'both'"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected a positive integer, got 0"),
        ({"chunk_tokens": -4}, "chunk_tokens: expected a positive integer, got -4"),
        ({"chunk_tokens": 4096.0}, "chunk_tokens: expected a positive integer, got 4096.0"),
        ({"page_tokens": "4k"}, "page_tokens: expected a positive integer, got '4k'"),
        ({"head_chunk_tokens": None}, "head_chunk_tokens: expected a positive integer, got None"),
        ({"replay_tokens": 0}, "replay_tokens: expected a positive integer, got 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: expected a positive integer, got 0"),
        ({"context_parallel_size": 0}, "context_parallel_size: expected a positive integer, got 0"),
        (
            {"expert_parallel_size": 2.0},
            "expert_parallel_size: expected a positive integer, got 2.0",
        ),
        (
            {"chunk_tokens": 17, "context_parallel_size": 4},
            "chunk_tokens: expected a multiple of context_parallel_size 4, got 17; 20 is one",
        ),
        ({"state_budget_gb": -1.0}, "state_budget_gb: expected 0 or more GiB, got -1.0"),
        ({"state_budget_gb": float("nan")}, "state_budget_gb: expected 0 or more GiB, got nan"),
        ({"host_state_budget_gb": "64"}, "host_state_budget_gb: expected 0 or more GiB, got '64'"),
        ({"staging": "page"}, "staging: expected one of ('segments', 'layer'), got 'page'"),
        ({"host_state": "latent"}, f"host_state: expected a list of any of {KINDS}, got 'latent'"),
        ({"host_state": ["kv"]}, f"host_state: expected a list of any of {KINDS}, got ['kv']"),
        ({"host_state": None}, f"host_state: expected a list of any of {KINDS}, got None"),
    ],
)
def test_rejects_values_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        LongStrawConfig(**options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 1, "page_tokens": 1, "head_chunk_tokens": 1},
        {"state_budget_gb": 0, "max_prompt_tokens": 1, "replay_tokens": 1},
        {"host_state": KINDS, "staging": "layer", "host_state_budget_gb": 0},
        {"state_budget_gb": float("inf"), "activation_checkpointing": True, "progress": False},
    ],
)
def test_accepts_the_ends_of_the_ranges(options: dict[str, Any]) -> None:
    config = LongStrawConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def test_placement_is_what_the_options_say() -> None:
    assert LongStrawConfig().placement == ON_DEVICE
    config = LongStrawConfig.from_mapping({"host_state": ["latent"], "staging": "layer"})
    assert config.placement == Placement(frozenset({"latent"}), "layer")
    assert config.host_state == ("latent",)


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LongStrawConfig().chunk_tokens = 1  # type: ignore[misc]


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_missing_or_empty_section_gives_the_defaults(nothing: dict[str, Any] | None) -> None:
    assert LongStrawConfig.from_mapping(nothing) == LongStrawConfig()


def test_a_mapping_sets_what_it_names() -> None:
    config = LongStrawConfig.from_mapping({"chunk_tokens": 7, "max_prompt_tokens": 100})
    assert config == LongStrawConfig(chunk_tokens=7, max_prompt_tokens=100)


def test_a_mapping_may_hold_every_option() -> None:
    options = dataclasses.asdict(LongStrawConfig())
    assert LongStrawConfig.from_mapping(options) == LongStrawConfig()


def test_a_mapping_with_an_unknown_option_names_it_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match="longstraw: unknown option 'chunk_token'; known are acti"):
        LongStrawConfig.from_mapping({"chunk_token": 7})


def test_a_mapping_is_range_checked() -> None:
    with pytest.raises(ValueError, match="page_tokens: expected a positive integer, got 0"):
        LongStrawConfig.from_mapping({"page_tokens": 0})
