"""Whole runs of tiny models on the CPU."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from longstraw_backend.bench.capture import capture
from longstraw_backend.bench.folder import Progress
from longstraw_backend.bench.plot import plot_files
from longstraw_backend.bench.runner import bench
from longstraw_backend.bench.settings import Settings
from longstraw_backend.cli import main
from longstraw_backend.tiny import AVAILABLE

from .small import small_settings, subject_of

FAMILIES = [f for f in ("qwen3", "qwen3_5", "glm_moe_dsa") if f in AVAILABLE]
TINY = "--shape tiny-qwen3 --context 256 --chunk 64 --page-tokens 100 --response 16".split()


def _bench(settings: Settings) -> dict[str, Any]:
    found = bench(settings, Console(file=io.StringIO()))
    assert found is not None
    return found


def _names(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(p["phase"], p["context"]) for p in found["phases"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_times_every_pass_and_compares_peaks(family: str) -> None:
    found = _bench(small_settings("replay", family, profile=True))
    names = ["capture", "score", "forward", "backward", "replay"]
    assert _names(found) == [(name, 256) for name in names]
    for phase in found["phases"]:
        assert phase["seconds"] > 0 and phase["tflops"] > 0 and phase["roofline_seconds"] > 0
        assert (phase["phase"] == "forward") == (phase["predicted_over_measured"] is None)
    for shares in found["kernels"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and shares["matmul"] > 0
    assert found["hardware"]["cpu_count"] and found["versions"]["torch"] and found["date"]
    assert found["ceilings"]["matmul"] > 0
    json.dumps(found)


def test_a_chunk_is_timed_after_a_random_state() -> None:
    found = _bench(small_settings(random_state=True))
    assert _names(found) == [("chunk", 256)] and found["phases"][0]["tokens"] == 64


@pytest.mark.parametrize("gradient", ["response_only", "exact"])
def test_a_step_is_the_engines_own(gradient: Any) -> None:
    found = _bench(small_settings("step", gradient=gradient))
    exact = ["prompt_backward"] if gradient == "exact" else []
    assert [n for n, _ in _names(found)] == ["capture", "score", "replay", *exact, "optimizer"]
    assert found["phases"][2]["tokens"] == 2 * 32


def test_a_ladder_reports_at_each_length_and_is_drawn(tmp_path: Path) -> None:
    found = _bench(small_settings("ladder", context=(64, 128, 200), replay=True, group=1))
    assert [c for n, c in _names(found) if n == "capture"] == [64, 128, 200]
    assert [c for n, c in _names(found) if n == "replay"] == [64, 128, 200]
    assert [c["stop"] for c in found["chunks"]] == [64, 128, 192, 200]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(found))
    pytest.importorskip("matplotlib")
    plot_files(files, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("gradient", ["response_only", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stopped_capture_goes_on_to_the_same_state(
    family: str, gradient: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(family=family, gradient=gradient, folder=tmp_path)
    settings = small_settings("replay", **options)
    subject = subject_of(settings)
    prompt = subject.tokens(settings.length)
    whole = capture(subject, prompt, Progress(small_settings(family=family)))
    assert whole is not None

    ticks = iter(range(1000))
    stopping = small_settings("replay", seconds=2.5, save_every=0, **options)
    stopped = subject_of(stopping)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr("longstraw_backend.bench.capture.time", clock)
    assert capture(stopped, prompt, Progress.begin(stopping)) is None
    monkeypatch.undo()
    again = small_settings("replay", resume=True, **options)
    progress = Progress.begin(again)
    assert [c.stop for c in progress.chunks] == [64, 128]
    resumed = capture(subject_of(again), prompt, progress)
    assert resumed is not None and resumed.length == 256
    assert [c.stop for c in progress.chunks] == [64, 128, 192, 256]
    for ours, theirs in zip(resumed.layers, whole.layers, strict=True):
        for a, b in zip(ours.visible(256), theirs.visible(256), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)


def test_state_of_another_walk_is_refused(tmp_path: Path) -> None:
    first = small_settings(folder=tmp_path)
    subject = subject_of(first)
    progress = Progress.begin(first)
    segment = capture(subject, subject.tokens(256), progress)
    assert segment is not None
    progress.save(segment)
    with pytest.raises(ValueError, match="--folder: .* holds the state of a run"):
        Progress.begin(first)
    with pytest.raises(ValueError, match="--resume: the state in .* is of chunk=64, got 32"):
        Progress.begin(small_settings(folder=tmp_path, resume=True, chunk=32))


def test_a_detached_run_leaves_its_result(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["bench", "capture", *TINY, "--no-profile", "--detach", str(folder)]) == 0
    deadline = time.monotonic() + 60
    while not (folder / "result.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    log = (folder / "log.txt").read_text()
    assert (folder / "result.json").exists(), log
    assert json.loads((folder / "progress.json").read_text())["captured"] == 256
    assert "of the roofline" in log


def test_a_plan_is_printed_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    options = ["--device", "cuda", "--lora", "16", "--context", "1M,2M", "--json", str(file)]
    assert main(["bench", "plan", "--shape", "qwen3.6-27b", *options]) == 0
    assert "tokens fit in 139 GiB" in capsys.readouterr().out
    assert json.loads(file.read_text())["plans"][1]["context"] == 2097152


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["capture", "--context", "1K,2K"], "--context: expected one length, got 2"),
        (["capture", "--context", "1.5M"], "--context: expected lengths such as"),
        (["ladder", "--context", "2K,1K"], "--context: expected lengths in ascending order"),
        (["ladder", "--context", "100,200"], "--context: expected multiples of --chunk"),
        (["step", "--random-state"], "--random-state: step times a whole capture"),
        (["capture", "--offload", "disk"], "--offload: expected none, all or a list"),
        (["capture", "--chunk", "0"], "--chunk: expected an integer of at least 1, got 0"),
        (["plan", "--plot", "x.png"], "--plot: a plan or a run in the background draws nothing"),
        (["capture", "--resume"], "--resume, --seconds: state is kept in a folder"),
        (["capture", "--shape", "x"], "--shape: expected one of"),
        (["capture", "--json", "/nowhere/x.json"], "--json: expected a file in an existing"),
    ],
)
def test_bad_options_are_named(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert text in capsys.readouterr().err


def test_settings_survive_json() -> None:
    settings = small_settings(folder=Path("x"), offload=("attention",))
    assert Settings.from_json(json.loads(json.dumps(settings.as_json()))) == settings
