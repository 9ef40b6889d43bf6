"""The engine on a checkpoint with a vision tower: trains its text model, exports its names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.tiny import tiny_model
from tests.models.wrapped import rewrite, save_wrapped, stack_experts, weights_of

from .ranks import run_ranks

OPTIONS = {"chunk_tokens": 17, "page_tokens": 40, "progress": False}


def _rows() -> list[Any]:
    from longstraw_backend.workers.verl.standalone import PPORow

    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 311, (40,), generator=draw)
    responses = [torch.randint(0, 311, (r,), generator=draw) for r in (7, 1)]
    return [
        PPORow(prompt, r, *(torch.full(r.shape, x) for x in (-5.7, 1, -5.6))) for r in responses
    ]


def _train_and_save(
    rank: int,
    world: int,
    *,
    path: str,
    saved: str,
    lora: int = 0,
    adapters: str | None = None,
    contents: tuple[str, ...] = ("hf_model",),
) -> Any:
    """Log-probs before a step; then exported weights, shards' names, and a checkpoint on disk."""
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    engine = build_engine(
        "longstraw", path, options=OPTIONS, lora_rank=lora, lora_adapter_path=adapters
    )
    rows = _rows()
    with engine.eval_mode():
        log_probs = engine.infer_batch(ppo_batch(rows))["model_output"]["log_probs"].values()
    with engine.train_mode():
        batch = ppo_batch(rows, global_rows=2 * world)
        engine.train_batch(batch, partial(ppo_loss, config=actor_config()))
    exported: dict[str, Tensor] = {n: p.clone() for n, p in engine.get_per_tensor_param()[0]}
    shards = [name for name, *_ in engine.get_per_tensor_param_shard()[0]]
    engine.checkpoint_manager.checkpoint_save_contents = list(contents)
    engine.save_checkpoint(saved)
    with engine.eval_mode():
        after = engine.infer_batch(ppo_batch(rows))["model_output"]["log_probs"].values()
    return log_probs.clone(), exported, shards, after.clone()


def _log_probs(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    from longstraw_backend.oracle import ordinary_log_probs

    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return torch.cat(
            [
                ordinary_log_probs(model, r.prompt, r.response, mode="full").log_probs
                for r in _rows()
            ]
        )


@pytest.mark.parametrize(("family", "world"), [("qwen3_5", 2), ("qwen3_5_moe", 1)])
def test_published_names_in_export_and_on_disk(family: str, world: int, tmp_path: Path) -> None:
    original, out = tmp_path / "original", tmp_path / "out"
    original.mkdir()
    save_wrapped(family, original)
    log_probs, exported, shards, _ = run_ranks(
        _train_and_save, world, tmp_path, path=str(original), saved=str(out)
    )[0]
    torch.testing.assert_close(log_probs[log_probs != 0], _log_probs(original), atol=1e-5, rtol=0)
    before, after = weights_of(original), weights_of(out / "huggingface")
    aside = {name for name in before if name.startswith(("mtp.", "model.visual."))}
    assert exported.keys() == before.keys() - aside
    assert set(shards) == stack_experts(exported).keys()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in aside)
    for name, weight in exported.items():
        assert torch.equal(after[name], weight.to(after[name].dtype)), name
    assert any(not torch.equal(after[name], before[name]) for name in exported)


def test_an_mtp_layer_beside_a_text_model_is_kept(tmp_path: Path) -> None:
    original, out = tmp_path / "original", tmp_path / "out"
    tiny_model("qwen3_next").save_pretrained(original)  # type: ignore[operator]
    mtp = {"mtp.fc.weight": torch.randn(4, 8)}
    rewrite(original, weights_of(original) | mtp)
    run_ranks(_train_and_save, 1, tmp_path, path=str(original), saved=str(out), lora=2)
    before, after = weights_of(original), weights_of(out / "huggingface")
    assert after.keys() == before.keys() and torch.equal(
        after["mtp.fc.weight"], mtp["mtp.fc.weight"]
    )
    assert any(not torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_fit_the_published_checkpoint(world: int, tmp_path: Path) -> None:
    """Saved alone and merged, both by its names, and loaded to train on."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    original, out = tmp_path / "original", tmp_path / "out"
    original.mkdir()
    save_wrapped("qwen3_5", original)
    train = partial(run_ranks, _train_and_save, world, path=str(original), lora=2)
    _, exported, _, trained = train(tmp_path / "first", saved=str(out))[0]
    layers = {name for name in exported if ".layers." in name}
    assert layers and all("model.language_model.layers." in name for name in layers)

    whole = AutoModelForImageTextToText.from_pretrained(original)
    adapted = PeftModel.from_pretrained(whole, out / "lora_adapter")
    merged = adapted.merge_and_unload().state_dict()
    before, after = weights_of(original), weights_of(out / "huggingface")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all(".layers." in name for name in changed)
    for name in after.keys() & merged.keys():
        torch.testing.assert_close(after[name], merged[name], atol=1e-7, rtol=1e-6)
    expected = _log_probs(out / "huggingface")
    torch.testing.assert_close(trained[trained != 0], expected, atol=1e-5, rtol=0)

    again = train(
        tmp_path / "second", saved=str(tmp_path / "out2"), adapters=str(out / "lora_adapter")
    )
    torch.testing.assert_close(again[0][0], trained, atol=1e-6, rtol=0)


def test_adapters_of_text_checkpoints_keep_their_names(tmp_path: Path) -> None:
    original, out = tmp_path / "original", tmp_path / "out"
    tiny_model("qwen3").save_pretrained(original)  # type: ignore[operator]
    run_ranks(
        _train_and_save,
        1,
        tmp_path,
        path=str(original),
        saved=str(out),
        lora=2,
        contents=("model",),
    )
    names = weights_of(out / "lora_adapter")
    assert names and all(n.startswith("base_model.model.model.layers.") for n in names)
    assert not weights_of(out / "huggingface")
