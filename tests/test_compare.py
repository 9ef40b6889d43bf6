"""``longstraw compare``: its numbers, its exit codes and its messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw_backend import cli
from longstraw_backend.compare import comparison as comparing
from longstraw_backend.compare.comparison import Comparison, compare
from longstraw_backend.compare.distances import (
    bitwise_equal,
    gradient_cosine,
    gradient_rel_l2,
    log_prob_errors,
)
from longstraw_backend.compare.inputs import batch, response_lengths
from longstraw_backend.compare.settings import Settings
from longstraw_backend.compare.sides import measured
from longstraw_backend.compare.verl_fsdp2 import verl_training
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.oracle import ordinary_training
from longstraw_backend.tiny import AVAILABLE, tiny_model

SMALL = {"prompt": 30, "response": 6, "group": 3, "prompts": 2, "chunk": 11}
ARGS = ["compare", *(f"--{name}={value}" for name, value in SMALL.items())]
KEYS = {
    "logprob_max_abs",
    "loss_rel",
    "grad_rel_l2",
    "grad_cosine",
    "score_replay_bitwise",
    "seconds",
    "peak_bytes",
    "settings",
    "versions",
}


def _compare(**options: Any) -> Comparison:
    return compare(Settings(**(SMALL | options)))


@pytest.mark.parametrize("family", AVAILABLE)
def test_float64_is_within_its_bars(family: str) -> None:
    found = _compare(family=family, dtype="float64")
    hybrid = family in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    assert found.bars == {"logprob_max_abs": 1e-9, "grad_rel_l2": 1e-7 if hybrid else 1e-9}
    assert found.within_bars
    assert found.apart.grad_cosine == pytest.approx(1, abs=1e-12)
    assert found.apart.loss_rel <= 1e-9


@pytest.mark.parametrize("options", [{}, {"lora": 3}, {"temperature": 0.6}], ids=str)
def test_float32_is_within_its_bars(options: dict[str, Any]) -> None:
    found = _compare(**options)
    assert found.bars == {"logprob_max_abs": 1e-5, "grad_rel_l2": 1e-5}
    assert found.within_bars and found.score_replay_bitwise


def test_bfloat16_is_judged_by_the_ordinary_error() -> None:
    found = _compare(dtype="bfloat16")
    assert set(found.bars) == {"float32_error.logprob_rms", "float32_error.grad_rel_l2"}
    assert found.float32_error is not None and found.within_bars
    assert found.float32_error["reference"].logprob_rms > 1e-4


def test_full_sequence_gradient_differs_and_has_no_bar() -> None:
    found = _compare(dtype="float64", against="full")
    assert found.bars == {"logprob_max_abs": 1e-9}
    assert found.apart.grad_rel_l2 > 0.01 and found.within_bars


def test_peak_memory_is_below_the_ordinary_one() -> None:
    # Gradients of the weights are on both sides: only a long prompt makes activations count.
    found = _compare(prompt=1500, response=8, prompts=1, chunk=128)
    assert 0 < found.peak_bytes["longstraw"] < found.peak_bytes["reference"] / 3


def test_peak_memory_does_not_grow_with_the_group() -> None:
    # Of equal rows: with ragged ones, which length meets gradients that are there already varies.
    options = {"prompt": 300, "response": 1, "prompts": 1}
    few, many = (_compare(**options, group=g).peak_bytes["longstraw"] for g in (2, 8))
    assert many <= few * 1.005


def test_peak_bytes_are_those_held_at_once() -> None:
    def work() -> float:
        kept = [torch.ones(1000, dtype=torch.float32) for _ in range(5)]
        del kept[1:]
        return float(torch.ones(2000, dtype=torch.float32).sum() + kept[0].sum())

    side = measured(work, torch.device("cpu"))
    assert side.result == 3000
    assert 20_000 <= side.peak_bytes < 22_000


def test_command_writes_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    assert cli.main([*ARGS, "--family=llama", "--dtype=float64", f"--json={file}"]) == 0
    shown = capsys.readouterr().out
    assert "bitwise equal" in shown and "by design" not in shown
    numbers = json.loads(file.read_text())
    assert KEYS <= numbers.keys()
    assert numbers["score_replay_bitwise"] is True
    assert numbers["seconds"].keys() == numbers["peak_bytes"].keys() == {"longstraw", "reference"}
    assert numbers["settings"] | SMALL == numbers["settings"]
    assert numbers["versions"]["torch"] == torch.__version__


def test_command_says_why_full_gradients_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGS, "--against=full"]) == 0
    assert "The gradients differ by design" in capsys.readouterr().out


def test_exit_code_is_1_outside_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparing.BARS, "float32", 0.0)
    assert cli.main(ARGS) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt=0"], ["--prompt", "at least 1", "got 0"]),
        (["--lora=-1"], ["--lora", "at least 0", "got -1"]),
        (["--temperature=0"], ["--temperature", "positive", "greedy"]),
        (["--family=mamba"], ["family", "llama", "'mamba'"]),
        (["--model=/nowhere"], ["--model", "/nowhere", "no such folder"]),
        (["--json=/nowhere/x.json"], ["--json", "/nowhere/x.json", "create"]),
        (["--against=verl-fsdp2", "--dtype=float64"], ["--dtype", "float32", "float64"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_bad_argument_is_named(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *args]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.parametrize("args", [["--dtype=int8"], ["--device=tpu"], ["--prompt=x"], ["--what"]])
def test_argument_that_is_none_ends_with_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *args])
    assert ended.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_missing_gpu_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--device=cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_response_lengths_are_ragged() -> None:
    assert response_lengths(32, 4) == [32, 22, 12, 1]
    assert response_lengths(7, 1) == [7]
    assert response_lengths(1, 3) == [1, 1, 1]


def test_batch_depends_on_the_seed_alone() -> None:
    first, again, other = (batch(Settings(seed=s), 50) for s in (1, 1, 2))
    assert torch.equal(first[0][0].prompt, again[0][0].prompt)
    assert not torch.equal(first[0][0].prompt, other[0][0].prompt)
    assert [len(g.rows) for g in first[0]] == [4, 4]
    assert [r.index for r in first[0][1].rows] == [1, 3, 5, 7]


def test_distances_by_hand() -> None:
    a, b = {"x": torch.tensor([3.0, 0.0])}, {"x": torch.tensor([3.0, 4.0]), "y": torch.zeros(2)}
    assert gradient_rel_l2(a, b) == pytest.approx(4 / 5)
    assert gradient_cosine(a, b) == pytest.approx(9 / 15)
    assert gradient_rel_l2({}, {}) == 0 and gradient_cosine({}, {}) == 1
    assert gradient_rel_l2(a, {}) == float("inf")


def test_distances_refuse_other_rows() -> None:
    rows = {0: LogProbs(torch.zeros(2), torch.zeros(2))}
    with pytest.raises(ValueError, match="rows"):
        log_prob_errors(rows, {})
    assert bitwise_equal(rows, rows) and not bitwise_equal(rows, {})


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 3])
def test_verl_fsdp2_is_the_full_sequence_oracle(lora: int) -> None:
    pytest.importorskip("verl")
    settings = Settings(**SMALL, lora=lora, against="verl-fsdp2", temperature=0.8)  # type: ignore[arg-type]
    model, groups, objective = _stock(settings)
    theirs = verl_training(settings, model, groups, objective).result
    expected = ordinary_training(model, groups, objective, mode="full")
    assert float(log_prob_errors(theirs.rows, expected.rows).abs().max()) <= 1e-5
    assert theirs.gradients.keys() == expected.gradients.keys()
    assert gradient_rel_l2(theirs.gradients, expected.gradients) <= 1e-5
    found = compare(settings)
    assert found.within_bars and found.apart.grad_rel_l2 > 0.01


def _stock(settings: Settings) -> Any:
    from longstraw_backend.compare.inputs import add_adapters, base_model

    model = base_model(settings)
    if settings.lora:
        model = add_adapters(model, settings.lora, settings.seed)
    return model, *batch(settings, 311)


def test_model_from_a_folder(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen2", initializer_range=0.1)
    model.save_pretrained(tmp_path)
    assert cli.main([*ARGS, f"--model={tmp_path}", "--dtype=float64"]) == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_loaded_model_computes_in_float64_throughout(family: str, tmp_path: Path) -> None:
    tiny_model(family, initializer_range=0.1).save_pretrained(tmp_path)
    found = _compare(family=None, model=str(tmp_path), dtype="float64", gradient="exact")
    assert found.bars == {"logprob_max_abs": 1e-9, "grad_rel_l2": 1e-9}
    assert found.within_bars


def test_unsupported_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny_model("llama", attention_dropout=0.1)
    model.save_pretrained(tmp_path)
    assert cli.main([*ARGS, f"--model={tmp_path}"]) == 2
    assert "attention_dropout" in capsys.readouterr().err
