"""Shapes have the sizes that their models are named for, and can be cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from longstraw_backend.bench.planner import state_of_layer
from longstraw_backend.bench.shapes import SHAPES, config_of
from longstraw_backend.models.families import layer_types_of
from longstraw_backend.models.sizes import ModelSizes
from longstraw_backend.tiny import AVAILABLE, tiny_model

# of the text models: a published name counts the vision tower and the drafting layer too
BILLIONS = {
    "qwen3.5-0.8b": (0.7, 0.9),
    "qwen3.5-4b": (4.0, 4.7),
    "qwen3.5-9b": (8.5, 9.5),
    "qwen3.6-27b": (26.5, 27.5),
    "qwen3.6-35b-a3b": (34.0, 36.0),
    "qwen3-8b": (8.0, 8.4),
    "glm-5.2": (743.0, 745.0),
}
STATE_KIB = {"qwen3.5-4b": 32, "qwen3.6-27b": 64, "qwen3.6-35b-a3b": 20, "glm-5.2": 93}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_that_they_are_named_for(name: str) -> None:
    least, most = BILLIONS[name]
    assert least <= ModelSizes.of(config_of(name)).parameters / 1e9 <= most


@pytest.mark.parametrize("name", STATE_KIB)
def test_a_token_of_state_has_the_published_bytes(name: str) -> None:
    config = config_of(name)
    layers = [state_of_layer(config, kind, 2) for kind in layer_types_of(config)]
    assert sum(layer.token for layer in layers) == STATE_KIB[name] * 1024


def test_fewer_layers_are_the_first_ones() -> None:
    config = config_of("glm-5.2", layers=4, vocab=1000)
    assert config.num_hidden_layers == 4 and config.vocab_size == 1000
    assert list(layer_types_of(config)) == ["full", "full", "full", "shared"]


@pytest.mark.parametrize("layers", [0, 25])
def test_layers_that_there_are_not_are_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="--layers: expected 1 to 24"):
        config_of("qwen3.5-0.8b", layers=layers)


@pytest.mark.parametrize("family", [f for f in ("qwen3", "qwen3_5_moe") if f in AVAILABLE])
def test_a_checkpoints_own_configuration_is_a_shape(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    config = config_of(str(tmp_path), layers=2)
    assert config.num_hidden_layers == 2 and len(layer_types_of(config)) == 2
    parameters = ModelSizes.of(config_of(str(tmp_path))).parameters
    assert parameters == sum(p.numel() for p in model.parameters())


def test_a_checkpoint_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"--shape: {tmp_path}: .*gpt2"):
        config_of(str(tmp_path))


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="--shape: expected one of qwen3.5-0.8b"):
        config_of("qwen9")
