"""A rank that fails in the middle of a step: the others end with its message and never hang, and a
new run goes on from the last checkpoint as if nothing had happened.

Ranks are forked from a server that has imported verl once: some of them get killed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.tiny import tiny_model

from .test_engine import OPTIONS, _full, _rows

GROUP_TIMEOUT = timedelta(seconds=60)
PROMPT = 20.0  # seconds from the fault to the last error; the group's timeout is far longer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("moe")
    tiny_model("qwen3_moe", num_hidden_layers=2, initializer_range=0.1).save_pretrained(path)
    return str(path)


def _rank(
    rank: int, world: int, port: int, out: Path, fn: Callable[..., Any], given: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=GROUP_TIMEOUT
    )
    torch.save(fn(rank, **given), out / f"{rank}.pt")
    os._exit(0)  # groups may be broken: there is nothing to leave in good order


def _run(fn: Callable[..., Any], world: int, out: Path, **given: Any) -> list[Any]:
    """Results rank by rank; None of a rank that was killed."""
    out.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.workers.verl.test_engine_faults", "verl.workers.engine"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, out, fn, given))
        for rank in range(world)
    ]
    deadline = time.monotonic() + 150
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert all(process.exitcode in (0, -signal.SIGKILL) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    files = [out / f"{rank}.pt" for rank in range(world)]
    return [torch.load(f, weights_only=False) if f.exists() else None for f in files]


def _engine(path: str, *, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    from longstraw_backend.workers.verl.standalone import build_engine

    return build_engine("longstraw", path, options=OPTIONS | options, engine=engine)


def _step(engine: Any, mine: slice = slice(None), poison: float = 0.0) -> float:
    """One update on these of all rows; ``poison`` is added to the first one's advantages."""
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, ppo_batch

    rows = _rows()
    rows[mine][0].advantages.add_(poison)
    with engine.train_mode():
        batch = ppo_batch(rows[mine], global_rows=len(rows))
        done = engine.train_batch(batch, partial(ppo_loss, config=actor_config()))
    return float(done["metrics"].get("grad_norm", 0.0))


def _parameters(engine: Any) -> dict[str, Tensor]:
    return {n: _full(p) for n, p in engine.module.named_parameters()}


def _local(engine: Any) -> dict[str, Tensor]:
    """This rank's parts of parameters and optimizer state."""
    from torch.distributed.fsdp import FSDPModule

    for part in engine.module.modules():
        if isinstance(part, FSDPModule):  # a failure may have left it with whole parameters
            part.reshard()
    named = dict(engine.module.named_parameters())
    for name, p in list(named.items()):
        named |= {f"{name} {key}": value for key, value in engine.optimizer.state[p].items()}
    return {n: getattr(t, "_local_tensor", t).detach().clone() for n, t in named.items()}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


CONTEXT = {"context_parallel_size": 2, "chunk_tokens": 16, "response_block": 8}


def _undisturbed(rank: int, *, path: str, folder: str) -> Any:
    """Two steps with a checkpoint between; then a buffer of one rank drifts."""
    engine = _engine(path, check_replicas=True, **CONTEXT)
    _step(engine)
    engine.save_checkpoint(folder)
    _step(engine)
    after = _parameters(engine)
    if rank == 1:
        dict(engine.module.named_buffers())["model.rotary_emb.inv_freq"].mul_(1 + 1e-6)
    with pytest.raises(RuntimeError, match="check_replicas") as caught:
        engine.optimizer_step()
    return after, str(caught.value)


def _resumed(rank: int, *, path: str, folder: str) -> Any:
    engine = _engine(path, **CONTEXT)
    engine.load_checkpoint(folder, del_local_after_load=False)
    _step(engine)
    return _parameters(engine)


def _arm(engine: Any, when: str, fault: Callable[[], None]) -> None:
    if when == "finalize":
        engine.optimizer.register_step_pre_hook(lambda *_: fault())
        return

    def hook(*_: Any) -> None:
        if torch.is_grad_enabled() == (when == "replay"):
            fault()

    engine.module.model.layers[1].register_forward_pre_hook(hook)


def _faulty(
    rank: int, *, path: str, folder: str, when: str, victim: int, kill: bool, noted: str
) -> Any:
    """The second step, in which a rank fails; what it looks like from here."""
    engine = _engine(path, **CONTEXT)
    engine.load_checkpoint(folder, del_local_after_load=False)
    before = _local(engine)

    def fault() -> None:
        Path(noted).write_text(str(time.time()))
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("boom")

    if rank == victim:
        _arm(engine, when, fault)
    with pytest.raises(RuntimeError) as caught:
        _step(engine)
    seconds = time.time() - float(Path(noted).read_text())
    with pytest.raises(RuntimeError, match="restart the run"):
        _step(engine)
    grads = [n for n, p in engine.module.named_parameters() if p.grad is not None]
    return str(caught.value), seconds, _same(before, _local(engine)), grads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def undisturbed(model_path: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return _run(_undisturbed, 2, out, path=model_path, folder=str(folder))


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.mark.parametrize(
    ("when", "victim", "kill", "said"),
    [
        ("capture", 1, False, "rank 1: RuntimeError: boom"),
        ("capture", 1, True, "no sign of rank [1]"),
        ("replay", 0, True, "the rank that keeps the store"),
        ("finalize", 1, True, "no sign of rank [1]"),
    ],
)
def test_a_fault_on_one_rank_ends_the_step_on_all(
    model_path: str,
    undisturbed: Any,
    folder: Path,
    tmp_path: Path,
    when: str,
    victim: int,
    kill: bool,
    said: str,
) -> None:
    digests = _digests(folder)
    given = dict(path=model_path, folder=str(folder), noted=str(tmp_path / "noted"))
    results = _run(_faulty, 2, tmp_path / "out", when=when, victim=victim, kill=kill, **given)
    message, seconds, unchanged, grads = results[1 - victim]
    assert said in message
    assert seconds < PROMPT
    assert unchanged or when == "finalize"
    assert not grads
    assert (results[victim] is None) == kill
    if not kill:
        assert results[victim][0] == "boom" and results[victim][2]
    assert _digests(folder) == digests


def test_a_new_run_goes_on_from_the_checkpoint(
    model_path: str, undisturbed: Any, folder: Path, tmp_path: Path
) -> None:
    resumed = _run(_resumed, 2, tmp_path / "out", path=model_path, folder=str(folder))
    assert _same(resumed[0], undisturbed[0][0])


def test_a_buffer_that_drifts_is_named(undisturbed: Any) -> None:
    messages = {message for _, message in undisturbed}
    assert len(messages) == 1
    assert "model.rotary_emb.inv_freq on ranks [0, 1]" in messages.pop()


def _replicated(rank: int, *, path: str) -> Any:
    """HSDP over two data-parallel ranks: a healthy step, a poisoned one, a healthy one; then a
    parameter of one rank drifts."""
    engine = _engine(path, engine={"fsdp_size": 1}, check_replicas=True)
    mine = slice(2 * rank, 2 * rank + 2)
    norms, seen = [], []
    for poison in (0.0, float("inf") if rank == 1 else 0.0, 0.0):
        norms.append(_step(engine, mine, poison))
        seen.append(_local(engine))
    drifting = dict(engine.module.named_parameters())["model.norm.weight"]
    if rank == 1:
        drifting.to_local().data[3] += 1e-6
    with pytest.raises(RuntimeError, match="check_replicas") as caught:
        engine.optimizer_step()
    if rank == 1:
        drifting.to_local().data[3] -= 1e-6
    return norms, seen, str(caught.value)


def test_replicas_stay_equal_and_a_poisoned_step_is_skipped_by_all(
    model_path: str, tmp_path: Path
) -> None:
    results = _run(_replicated, 2, tmp_path / "out", path=model_path)
    for norms, (first, poisoned, last), message in results:
        assert not torch.tensor(norms[1]).isfinite()
        assert torch.tensor([norms[0], norms[2]]).isfinite().all()
        assert _same(first, poisoned) and not _same(poisoned, last)
        assert all(p.isfinite().all() for p in last.values())
        assert "model.norm.weight on ranks [0, 1]" in message
        assert "ranks [0], ranks [1]" in message
    assert _same(results[0][1][2], results[1][1][2])


def _alone(rank: int, *, path: str, gradient: str) -> Any:
    """One rank may go on after a failure: with and without one in the second step."""
    seen = []
    for fails in (False, True):
        engine = _engine(path, gradient=gradient)
        _step(engine)
        if fails:
            with pytest.raises(ZeroDivisionError), engine.train_mode():
                hook = engine.module.model.layers[1].register_full_backward_pre_hook(
                    lambda *_: 1 / 0
                )
                _step(engine)
            hook.remove()
        _step(engine)
        seen.append(_parameters(engine))
    return seen


@pytest.mark.parametrize("gradient", ["response_only", "exact"])
def test_nothing_of_a_failed_step_leaks_into_the_next(
    model_path: str, tmp_path: Path, gradient: str
) -> None:
    ((healthy, failed),) = _run(_alone, 1, tmp_path / "out", path=model_path, gradient=gradient)
    assert _same(healthy, failed)
