"""Checkpoints that hold more than a text model: loading, published names, writing back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longstraw_backend.models import check_supported
from longstraw_backend.models.checkpoint import (
    checkpoint_name,
    holds_more,
    is_wrapped,
    restore_checkpoint,
    text_config,
    text_name,
)
from longstraw_backend.tiny import tiny_model

from .wrapped import rewrite, save_latent, save_wrapped, stack_experts, weights_of

WRAPPED = ("qwen3_5", "qwen3_5_moe")


@pytest.fixture(params=WRAPPED)
def original(request: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    save_wrapped(request.param, folder)
    return folder


def _loaded(original: Path) -> Any:
    config = text_config(AutoConfig.from_pretrained(original))
    return AutoModelForCausalLM.from_pretrained(original, config=config)


def test_the_text_model_alone_is_loaded(original: Path) -> None:
    config = AutoConfig.from_pretrained(original)
    assert is_wrapped(config) and not is_wrapped(config.text_config)
    model = _loaded(original)
    check_supported(model.config)
    (architecture,) = model.config.architectures
    assert architecture == type(model).__name__ and architecture.endswith("ForCausalLM")
    published = weights_of(original)
    for name, p in model.named_parameters():
        if "experts" not in name:  # fused in memory
            assert torch.equal(p, published[checkpoint_name(name)]), name


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
def test_text_checkpoints_are_left_alone(family: str) -> None:
    config: Any = tiny_model(family).config
    assert not is_wrapped(config) and text_config(config) is config


def test_the_whole_model_is_refused_by_name(original: Path) -> None:
    with pytest.raises(ValueError, match="vision tower.*AutoModelForCausalLM"):
        check_supported(AutoConfig.from_pretrained(original))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        (
            "base_model.model.model.layers.3.mlp.up_proj.lora_A.weight",
            "base_model.model.model.language_model.layers.3.mlp.up_proj.lora_A.weight",
        ),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
    ],
)
def test_published_names(name: str, published: str) -> None:
    assert checkpoint_name(name) == published
    assert text_name(published) == text_name(name)


def _save_as_hosts_do(model: Any, folder: Path, **options: Any) -> None:
    """Through a model made from the configuration, which has no memory of the checkpoint."""
    AutoModelForCausalLM.from_config(model.config).save_pretrained(
        folder, state_dict=model.state_dict(), **options
    )


@pytest.mark.parametrize("size", ["1GB", "50KB"])
def test_written_back_with_new_weights(original: Path, tmp_path: Path, size: str) -> None:
    model, saved = _loaded(original), tmp_path / "saved"
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    _save_as_hosts_do(model, saved, max_shard_size=size)
    restore_checkpoint(saved, original)
    after = weights_of(saved)
    _assert_raised_by_one(weights_of(original), after, ("mtp.", "model.visual."))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    again = _loaded(saved)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))  # noqa: B905


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_written_back_with_stacked_experts(tmp_path: Path, size: str) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    original.mkdir()
    save_wrapped("qwen3_5_moe", original)
    rewrite(original, stack_experts(weights_of(original)))
    model = _loaded(original)
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    _save_as_hosts_do(model, saved, max_shard_size=size)
    assert any(".experts.0.up_proj." in name for name in weights_of(saved))
    restore_checkpoint(saved, original)
    _assert_raised_by_one(weights_of(original), weights_of(saved), ("mtp.", "model.visual."))


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v3"])
@pytest.mark.parametrize("stacked", [False, True])
def test_mtp_layers_after_the_last_are_written_back(
    family: str, stacked: bool, tmp_path: Path
) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    original.mkdir()
    save_latent(family, original)
    assert holds_more(original)
    model = AutoModelForCausalLM.from_pretrained(original)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 1
    if stacked:
        saved.mkdir()
        rewrite(saved, model.state_dict())
    else:
        _save_as_hosts_do(model, saved)
    restore_checkpoint(saved, original)
    _assert_raised_by_one(weights_of(original), weights_of(saved), ("model.layers.3.",))


def test_a_shared_layers_own_indexer_is_dropped(tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    original.mkdir()
    save_latent("glm_moe_dsa", original)
    _save_as_hosts_do(AutoModelForCausalLM.from_pretrained(original), saved)
    weights = weights_of(original)
    rewrite(original, {n: w for n, w in weights.items() if ".layers.2.self_attn.indexer." not in n})
    restore_checkpoint(saved, original)
    assert weights_of(saved).keys() == weights_of(original).keys() != weights.keys()


def _assert_raised_by_one(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], kept: tuple[str, ...]
) -> None:
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] + (not name.startswith(kept))), name


def test_text_models_hold_no_more(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    assert not holds_more(tmp_path)


def test_experts_in_a_third_layout_are_refused(tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    original.mkdir()
    save_wrapped("qwen3_5_moe", original)
    _save_as_hosts_do(_loaded(original), saved)
    weights = stack_experts(weights_of(original))
    turned = {n: w.mT.contiguous() if ".experts." in n else w for n, w in weights.items()}
    rewrite(original, turned)
    before = sorted(weights_of(saved))
    with pytest.raises(ValueError, match="differ in 1 weights"):
        restore_checkpoint(saved, original)
    assert sorted(weights_of(saved)) == before and not (saved / "restored").exists()


def test_another_models_checkpoint_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    original, saved = tmp_path / "original", tmp_path / "saved"
    original.mkdir()
    save_wrapped("qwen3_5", original)
    deeper: Any = tiny_model(
        "qwen3_5", num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"]
    )
    _save_as_hosts_do(deeper, saved)
    before = sorted(weights_of(saved))
    with pytest.raises(ValueError, match="differ in .* weights"):
        restore_checkpoint(saved, original)
    assert sorted(weights_of(saved)) == before
