"""The demo's families: each builds and takes a step, and its run's arguments fit it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longstraw_backend.models import drive

# The demo's modules are scripts that find each other beside themselves.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))
import curriculum  # noqa: E402
import families  # noqa: E402
import indexer  # noqa: E402
import model  # noqa: E402
import run  # noqa: E402

VOCABULARY = 64


def config_of(family: str) -> Any:
    return families.FAMILIES[family].config(**model.token_options(VOCABULARY))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_family_learns(family: str) -> None:
    torch.manual_seed(0)
    driven = model.new_model(config_of(family))
    optimizer = model.new_optimizer(driven, 1e-2)
    batch = curriculum.copy_batch(VOCABULARY, rows=2, chunks=2)
    losses = [model.train_step(driven, optimizer, *batch) for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_configuration_survives_a_checkpoint(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_model_of_the_warm_up_is_that_of_the_run_where_all_tokens_are_selected() -> None:
    torch.manual_seed(0)
    family = families.FAMILIES["glm_moe_dsa"]
    assert family.warm_up is not None
    warm = model.new_model(family.warm_up(**model.token_options(VOCABULARY)))
    for parameter in warm.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    run_of_it = drive(model.with_weights(config_of("glm_moe_dsa"), warm.module))
    tokens, _ = curriculum.copy_batch(VOCABULARY, rows=2)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    wanted, found = (model.logits_at(m, tokens, everywhere, grad=False) for m in (warm, run_of_it))
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def sparse_and_its_warm_up() -> tuple[Any, Any]:
    """A GLM-shaped model that selects 4 tokens, and the model it gets its weights from."""
    torch.manual_seed(0)
    family = families.FAMILIES["glm_moe_dsa"]
    assert family.warm_up is not None
    warm = model.new_model(family.warm_up(**model.token_options(VOCABULARY))).module
    config = config_of("glm_moe_dsa")
    config.index_topk = 4
    return model.with_weights(config, warm), warm


def test_indexer_is_trained_on_the_scores_that_it_selects_by() -> None:
    sparse, warm = sparse_and_its_warm_up()
    tokens, _ = curriculum.copy_batch(VOCABULARY, rows=1)
    _, hidden, rope = indexer.dense_attention(indexer.undriven(warm), tokens)
    scores = indexer.index_scores(sparse.model.layers[0].self_attn, hidden, rope)
    driven, chosen = drive(sparse), {}
    driven.module.model.layers[0].self_attn.register_forward_hook(
        lambda _, __, out: chosen.update(selection=out[2])
    )
    model.logits_at(driven, tokens, torch.ones_like(tokens, dtype=torch.bool), grad=False)
    assert chosen["selection"][0, -1].tolist() == scores[0, -1].topk(4).indices.sort()[0].tolist()


def test_indexer_comes_closer_to_the_attention_and_nothing_else_moves() -> None:
    sparse, warm = sparse_and_its_warm_up()
    before = {name: value.clone() for name, value in sparse.state_dict().items()}
    batch = curriculum.copy_batch(VOCABULARY, rows=2)
    first = indexer.train_indexer(sparse, warm, lambda: batch, steps=1)
    last = indexer.train_indexer(sparse, warm, lambda: batch, steps=20)
    assert last < first
    moved = [n for n, value in sparse.state_dict().items() if not torch.equal(value, before[n])]
    assert moved and all(".indexer." in name for name in moved)


def test_loss_is_that_of_the_tokens_with_a_label() -> None:
    """Against the stock model: the walk from an empty state is an ordinary forward."""
    torch.manual_seed(0)
    driven = model.new_model(config_of("qwen3"))
    tokens, labels = curriculum.copy_batch(VOCABULARY, rows=2, chunks=2)
    optimizer = torch.optim.SGD(driven.module.parameters(), lr=0.0)
    stock = AutoModelForCausalLM.from_config(driven.module.config, attn_implementation="sdpa")
    stock.load_state_dict(driven.module.state_dict())
    with torch.no_grad():
        wanted = stock(input_ids=tokens, labels=labels).loss.item()
    assert model.train_step(driven, optimizer, tokens, labels) == pytest.approx(wanted, rel=1e-5)


def test_folders_are_kept_apart_by_family() -> None:
    default, hybrid = run.parse([]), run.parse(["--family", "qwen3_5"])
    assert default.data != hybrid.data and default.out != hybrid.out


def test_engine_that_computes_a_family_wrongly_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--family", "glm_moe_dsa", "--strategy", "fsdp2"])
    assert "glm_moe_dsa needs longstraw" in capsys.readouterr().err
