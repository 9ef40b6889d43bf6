"""The engine on a checkpoint with a vision tower: trains its text model, exports its names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.wrapped import save_wrapped, weights_of

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


def _train_and_save(rank: int, world: int, *, path: str, saved: str, lora: int = 0) -> Any:
    """Log-probs before a step; then exported weights, and a checkpoint on disk."""
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    engine = build_engine("longstraw", path, options=OPTIONS, lora_rank=lora)
    rows = _rows()
    with engine.eval_mode():
        log_probs = engine.infer_batch(ppo_batch(rows))["model_output"]["log_probs"].values()
    with engine.train_mode():
        batch = ppo_batch(rows, global_rows=2 * world)
        engine.train_batch(batch, partial(ppo_loss, config=actor_config()))
    exported: dict[str, Tensor] = {n: p.clone() for n, p in engine.get_per_tensor_param()[0]}
    engine.checkpoint_manager.checkpoint_save_contents = ["hf_model"]
    engine.save_checkpoint(saved)
    return log_probs.clone(), exported


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
    log_probs, exported = run_ranks(
        _train_and_save, world, tmp_path, path=str(original), saved=str(out)
    )[0]
    torch.testing.assert_close(log_probs[log_probs != 0], _log_probs(original), atol=1e-5, rtol=0)
    before, after = weights_of(original), weights_of(out / "huggingface")
    aside = {name for name in before if name.startswith(("mtp.", "model.visual."))}
    assert exported.keys() == before.keys() - aside
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in aside)
    for name, weight in exported.items():
        assert torch.equal(after[name], weight.to(after[name].dtype)), name
    assert any(not torch.equal(after[name], before[name]) for name in exported)


def test_adapters_are_exported_by_published_names(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.mkdir()
    save_wrapped("qwen3_5", original)
    _, exported = run_ranks(
        _train_and_save, 1, tmp_path, path=str(original), saved=str(tmp_path / "out"), lora=2
    )[0]
    layers = {name for name in exported if ".layers." in name}
    assert layers and all("model.language_model.layers." in name for name in layers)
