"""``longstraw compare --cp --ep --dp``: splits of the work over ranks against one rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw_backend import cli
from longstraw_backend.compare.ranks import on_ranks
from longstraw_backend.compare.settings import DELTA_NET_GRADIENT_BAR, Settings
from longstraw_backend.compare.split import Split, compare_split, resolved

SMALL: dict[str, Any] = {"prompt": 20, "response": 6, "group": 2, "chunk": 8, "response_block": 4}
CASES: list[dict[str, Any]] = [
    {"family": "qwen3", "cp": 2, "gradient": "exact", "lora": 4, "turns": 3},
    {"family": "qwen3", "dp": 2, "prompts": 1},  # a rank without a prompt
    {"family": "qwen3_moe", "dp": 2, "ep": 2, "gradient": "exact"},  # experts of other prompts
    {"family": "qwen3_5", "cp": 2},
    {"family": "glm_moe_dsa", "cp": 2, "ep": 2, "gradient": "exact", "lora": 4},
    {"family": "deepseek_v3", "cp": 2, "ep": 1, "lora": 4},
    {"family": "qwen3_moe", "cp": 2, "dtype": "bfloat16"},
    {"family": "qwen3_moe", "cp": 2, "dp": 2, "ep": 4, "gradient": "exact"},
    {"family": "qwen3_5", "cp": 4, "gradient": "exact", "lora": 4},
    {"family": "glm_moe_dsa", "cp": 4, "ep": 2},
]


def _settings(case: dict[str, Any]) -> Settings:
    return resolved(Settings(**({"dtype": "float64"} | SMALL | case)))


def _compared(cases: list[Settings]) -> list[Split | None]:
    return [compare_split(case) for case in cases]


@pytest.fixture(scope="module")
def results() -> dict[int, list[Split]]:
    """By number of ranks; starting them takes longer than most of what they do."""
    settings = [_settings(case) for case in CASES]
    return {
        world: on_ranks(_compared, world, "cpu", [s for s in settings if s.ranks == world])
        for world in (2, 4)
    }  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_split_gives_the_numbers_of_one_rank(
    results: dict[int, list[Split]], case: dict[str, Any]
) -> None:
    settings = _settings(case)
    (found,) = [s for s in results[settings.ranks] if s.settings == settings]
    assert found.within_bars, found.numbers
    assert found.score_replay_bitwise
    if settings.dtype == "float64":
        bar = DELTA_NET_GRADIENT_BAR if found.delta_net else 1e-10
        names = ("grad_rel_l2", "parameter_rel_l2")
        assert found.bars == {"logprob_max_abs": 1e-9, **dict.fromkeys(names, bar)}
        assert found.apart.loss_rel <= 1e-12 and found.norm_rel <= 1e-10
        assert 0 < found.update_rel_l2 <= 1e-6
    assert len(found.state_bytes) == settings.ranks
    if not found.delta_net:
        assert sum(found.state_bytes) == found.one_rank_state_bytes


def test_a_rank_without_a_prompt_holds_nothing(results: dict[int, list[Split]]) -> None:
    (found,) = [s for s in results[2] if s.settings.prompts == 1]
    assert found.state_bytes[1] == 0


def test_bfloat16_is_judged_by_the_error_of_one_rank(results: dict[int, list[Split]]) -> None:
    (found,) = [s for s in results[2] if s.settings.dtype == "bfloat16"]
    assert found.float32_error is not None
    twice = 2 * found.float32_error["one"].grad_rel_l2
    assert found.bars["float32_error.grad_rel_l2"] == twice > 1e-4


def test_experts_are_shared_by_those_that_share_a_prompt_if_not_told() -> None:
    assert _settings({"family": "qwen3_moe", "cp": 4}).ep == 4
    assert _settings({"family": "qwen3_moe", "cp": 2, "dp": 2}).ep == 2
    assert _settings({"family": "qwen3", "cp": 4}).ep == 1


def test_joins_the_ranks_that_torchrun_started(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "longstraw_backend", "compare", "--cp=2", *options]
    ranks = [
        subprocess.Popen(
            [*command, f"--json={tmp_path / str(rank)}"],
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    shown = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert "2 ranks (dp 1 x cp 2, ep 1)" in " ".join(shown[0].split()) and not shown[1]
    numbers = json.loads((tmp_path / "0").read_text())
    assert numbers["within_bars"] and len(numbers["state_bytes"]) == 2
    assert not (tmp_path / "1").exists()


def test_ranks_that_torchrun_started_must_be_as_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["compare", "--cp=2"]) == 2
    message = capsys.readouterr().err
    assert "--cp, --dp" in message and "expected 3" in message and "got 2" in message


def _refused(settings: Settings) -> None:
    raise ValueError(f"family: {settings.family} is refused")


def test_an_error_of_all_ranks_is_that_of_the_command() -> None:
    with pytest.raises(ValueError, match="^family: qwen3 is refused$"):
        on_ranks(_refused, 2, "cpu", Settings())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cp=0"], ["--cp", "at least 1", "got 0"]),
        (["--dp=0"], ["--dp", "at least 1", "got 0"]),
        (["--ep=2"], ["--ep", "divisor", "= 1", "got 2"]),
        (["--ep=0", "--cp=2"], ["--ep", "divisor", "got 0"]),
        (["--ep=3", "--cp=2"], ["--ep", "divisor", "= 2", "got 3"]),
        (["--ep=2", "--cp=2"], ["--ep", "0 experts", "got 2"]),
        (["--ep=3", "--dp=3", "--family=qwen3_moe"], ["--ep", "8 experts", "got 3"]),
        (["--cp=4", "--chunk=10"], ["--chunk", "multiple of --cp 4", "12 is one"]),
        (["--cp=4", "--response-block=7"], ["--response-block", "multiple of --cp 4", "8 is one"]),
        (["--cp=2", "--against=full"], ["--against", "one", "leave it out"]),
        (["--cp=2", "--family=mamba"], ["--family", "llama", "'mamba'"]),
        (["--cp=2", "--model=/nowhere"], ["--model", "/nowhere"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") and "=" in value[0] else "",
)
def test_bad_size_is_named(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *args]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without GPUs")
def test_missing_gpus_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--cp=2", "--device=cuda"]) == 2
    assert "--device" in capsys.readouterr().err
