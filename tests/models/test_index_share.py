"""Which layers select and which share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from longstraw_backend.models.index_share import indexer_schedule, layer_kinds


def config(layers: int, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"num_hidden_layers": layers, "index_topk": 2048} | options))


def full(kinds: list[Any]) -> list[int]:
    return [i for i, kind in enumerate(kinds) if kind == "full"]


def test_glm_5_2_selects_in_21_of_78_layers() -> None:
    kinds = layer_kinds(config(78, index_topk_freq=4, index_skip_topk_offset=3))
    assert full(kinds) == [0, 1, *range(2, 78, 4)] and len(full(kinds)) == 21


def test_offset_is_two_where_it_is_not_given() -> None:
    assert full(layer_kinds(config(10, index_topk_freq=4))) == [0, 1, 5, 9]


def test_every_layer_selects_by_default() -> None:
    assert layer_kinds(config(3)) == ["full"] * 3
    assert layer_kinds(config(3, index_topk_freq=0)) == ["full"] * 3


def test_pattern_overrides_the_schedule() -> None:
    options = dict(index_topk_pattern="FSSF", index_topk_freq=2)
    assert layer_kinds(config(4, **options)) == ["full", "shared", "shared", "full"]


def test_types_override_everything() -> None:
    types = ["full", "shared", "full"]
    assert layer_kinds(config(3, indexer_types=types, index_topk_pattern="FFF")) == types


def test_model_without_an_indexer_is_dense() -> None:
    assert layer_kinds(config(2, index_topk=None)) == ["dense"] * 2
    assert layer_kinds(AutoConfig.for_model("deepseek_v3", num_hidden_layers=2)) == ["dense"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(indexer_types=["full"]), "expected 3, one for each layer, got 1"),
        (dict(indexer_types=["shared", "full", "full"]), "no layer before it"),
        (dict(index_topk_pattern="FXS"), "expected 'full' or 'shared', got 'X'"),
    ],
)
def test_types_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_kinds(config(3, **options))


def test_configuration_of_the_installed_transformers() -> None:
    """Explicit types are kept; a schedule with another offset is right or refused, never wrong."""
    expected = indexer_schedule(12, 4, 3)
    explicit = AutoConfig.for_model(
        "glm_moe_dsa", num_hidden_layers=12, indexer_types=expected, index_skip_topk_offset=3
    )
    assert layer_kinds(explicit) == expected
    options: dict[str, Any] = dict(index_topk_freq=4, index_skip_topk_offset=3)
    derived = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=12, **options)
    if derived.indexer_types == expected:
        assert layer_kinds(derived) == expected
    else:
        with pytest.raises(ValueError, match="write indexer_types into config.json"):
            layer_kinds(derived)
