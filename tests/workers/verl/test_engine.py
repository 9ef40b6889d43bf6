"""The engine on gloo ranks, against verl's own fsdp2 engine and the detached reference."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw_backend.tiny import tiny_model

from .ranks import run_ranks

OPTIONS = {"chunk_tokens": 17, "page_tokens": 40, "head_chunk_tokens": 5, "progress": False}
LENGTHS = [
    (50, 7),
    (33, 12),
    (50, 1),
    (33, 5),
]  # (prompt, response) per row: two groups, interleaved


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", initializer_range=0.1).save_pretrained(path)
    return str(path)


def _rows(lengths: list[tuple[int, int]] = LENGTHS) -> list[Any]:
    from longstraw_backend.workers.verl.standalone import PPORow

    draw = torch.Generator().manual_seed(1)
    prompts = {p: torch.randint(0, 311, (p,), generator=draw) for p in {p for p, _ in lengths}}
    rows = []
    for p, r in lengths:
        response = torch.randint(0, 311, (r,), generator=draw)
        old = -5.7 + 0.3 * torch.randn(r, generator=draw)
        advantage = torch.randn((), generator=draw).expand(r).clone()
        rows.append(PPORow(prompts[p], response, old, advantage, old - 0.1))
    return rows


def _full(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def _fill_lora_b(module: torch.nn.Module) -> None:
    """Non-zero and equal on every layout, or a wrong reduction could hide in the first step."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for i, (name, p) in enumerate(sorted(module.named_parameters())):
            if "lora_" in name:
                full = 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
                sharded = hasattr(p, "device_mesh")
                p.copy_(distribute_tensor(full, p.device_mesh, p.placements) if sharded else full)


def _two_steps(
    rank: int,
    world: int,
    *,
    path: str,
    strategy: str,
    lora: int = 0,
    lr: float = 1e-3,
    options: dict[str, Any] | None = None,
    **loss: Any,
) -> Any:
    """Log-probs, then two training steps; gradients and parameters by name."""
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    engine = build_engine(strategy, path, options=OPTIONS | (options or {}), lora_rank=lora, lr=lr)
    _fill_lora_b(engine.module)
    rows = _rows()
    mine = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    batch = partial(ppo_batch, mine, global_rows=len(rows), temperature=0.9, entropy=True)
    with engine.eval_mode():
        out = engine.infer_batch(batch())["model_output"]
    mask = batch()["response_mask"]
    seen: dict[str, Any] = {
        name: [v.clone() for v in response_from_nested(out[name], mask).unbind()]
        for name in ("log_probs", "entropy")
    }
    config = actor_config(**loss)
    seen["losses"], seen["norms"], seen["grads"] = [], [], []
    for _ in range(2):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            done = engine.forward_backward_batch(batch(), partial(ppo_loss, config=config))
            grads = {
                n: _full(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None
            }
            seen["grads"].append(grads)
            seen["norms"].append(engine.optimizer_step())
        seen["losses"].append(math.fsum(done["loss"]))
        seen["metrics"] = {k: getattr(v, "values", v) for k, v in done["metrics"].items()}
    seen["parameters"] = {n: _full(p) for n, p in engine.module.named_parameters()}
    exported, _ = engine.get_per_tensor_param()
    seen["exported"] = {n: tuple(p.shape) for n, p in exported}
    return seen


def _relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    gap = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in ours)
    return math.sqrt(gap / sum(float(t.double().square().sum()) for t in theirs.values()))


def _detached_gradients(path: str, **loss: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the same rows by ordinary autograd, prompt state detached."""
    from transformers import AutoModelForCausalLM
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.oracle import ordinary_log_probs
    from longstraw_backend.workers.verl.batch import LossRows, loss_output
    from longstraw_backend.workers.verl.standalone import actor_config, ppo_batch

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    rows = _rows()
    batch = ppo_batch(
        rows, temperature=0.9, entropy=True, batch_num_tokens=sum(r for _, r in LENGTHS), dp_size=1
    )
    views, total = LossRows(batch, "cpu"), 0.0
    for i, row in enumerate(rows):
        out = ordinary_log_probs(
            model, row.prompt, row.response, mode="detached", temperature=0.9, entropy=True
        )
        loss_value, _ = ppo_loss(actor_config(**loss), loss_output(out, True), views[i])
        loss_value.backward()
        total += float(loss_value)
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


LOSS = dict(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)


@pytest.fixture(scope="session")
def one_rank(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("one")
    return run_ranks(_two_steps, 1, out, path=model_path, strategy="longstraw", **LOSS)[0]


def test_log_probs_and_entropy_match_the_stock_engine(
    model_path: str, one_rank: Any, tmp_path: Path
) -> None:
    stock = run_ranks(_two_steps, 1, tmp_path, path=model_path, strategy="fsdp2", **LOSS)[0]
    for name in ("log_probs", "entropy"):
        for ours, theirs in zip(one_rank[name], stock[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert one_rank["losses"][0] == pytest.approx(stock["losses"][0], rel=1e-5, abs=1e-6)
    assert one_rank["exported"] == stock["exported"]
    stock_metrics = {k for k in one_rank["metrics"] if not k.startswith("longstraw/")}
    assert stock_metrics == stock["metrics"].keys()


def test_gradients_match_the_detached_reference(model_path: str, one_rank: Any) -> None:
    loss, grads = _detached_gradients(model_path, **LOSS)
    assert one_rank["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert _relative(one_rank["grads"][0], grads) <= 1e-5


def test_two_ranks_give_the_numbers_of_one(model_path: str, one_rank: Any, tmp_path: Path) -> None:
    two = run_ranks(_two_steps, 2, tmp_path, path=model_path, strategy="longstraw", **LOSS)
    for step in range(2):
        assert sum(r["losses"][step] for r in two) / 2 == pytest.approx(
            one_rank["losses"][step], rel=1e-5
        )
        assert two[0]["norms"][step] == pytest.approx(one_rank["norms"][step], rel=1e-5)
        assert _relative(two[0]["grads"][step], one_rank["grads"][step]) <= 1e-5
    assert _relative(two[0]["parameters"], one_rank["parameters"]) <= 1e-6


def test_lora_two_ranks_give_the_numbers_of_one(model_path: str, tmp_path: Path) -> None:
    run = partial(run_ranks, _two_steps, path=model_path, strategy="longstraw", lora=4, **LOSS)
    one, two = run(1, tmp_path / "1")[0], run(2, tmp_path / "2")
    assert all("lora_" in name for name in one["grads"][0])
    for step in range(2):
        assert _relative(two[0]["grads"][step], one["grads"][step]) <= 1e-5
    assert _relative(two[0]["parameters"], one["parameters"]) <= 1e-6


def _lora_reference(rank: int, world: int, *, path: str) -> Any:
    """Adapters off must give the base model's log-probs, and must not disturb the adapters'."""
    from longstraw_backend.workers.verl.standalone import build_engine, ppo_batch

    engine = build_engine("longstraw", path, options=OPTIONS, lora_rank=4)
    rows = _rows()

    def infer() -> Tensor:
        with engine.eval_mode():
            return engine.infer_batch(ppo_batch(rows))["model_output"]["log_probs"].values()

    base = infer()  # B is zero: equal to the base model
    _fill_lora_b(engine.module)
    engine.walk.store.clear()
    policy = infer()
    with engine.disable_adapter():
        reference = infer()
    states = len(engine.walk.store)
    return base, policy, reference, infer(), states


def test_reference_is_the_actor_with_adapters_off(model_path: str, tmp_path: Path) -> None:
    (result,) = run_ranks(_lora_reference, 1, tmp_path, path=model_path)
    base, policy, reference, again, states = result
    assert torch.equal(reference, base)
    assert torch.equal(again, policy) and not torch.equal(policy, base)
    assert states == 4  # two prompts, with and without adapters


def _odd_batches(rank: int, world: int, *, path: str) -> Any:
    """Padding rows, empty and one-token responses, one-token prompts; ranks with unequal groups."""
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    lengths = [[(20, 3), (20, 0), (1, 4), (127, 1)], [(41, 6), (41, 6), (41, 2), (41, 1)]][rank]
    rows = _rows(lengths)
    engine = build_engine("longstraw", path, options=OPTIONS)
    per_row = torch.tensor([0.5, 1.0, 0.7, 1.3])
    with engine.eval_mode():
        out = engine.infer_batch(ppo_batch(rows, temperature=per_row, entropy=True))
    with engine.train_mode():
        done = engine.train_batch(
            ppo_batch(rows, global_rows=8, temperature=per_row),
            partial(ppo_loss, config=actor_config()),
        )
    return [v.clone() for v in out["model_output"]["log_probs"].unbind()], rows, done["metrics"]


def test_odd_rows_and_unequal_ranks_do_not_hang(model_path: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = run_ranks(_odd_batches, 2, tmp_path, path=model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for log_probs, rows, metrics in results:
        assert metrics["grad_norm"] > 0
        for got, row, tau in zip(log_probs, rows, [0.5, 1.0, 0.7, 1.3], strict=True):
            r = row.response.numel()
            assert got.shape == (r + 1,)
            with torch.no_grad():
                logits = model(torch.cat([row.prompt, row.response])[None]).logits[0]
            logits = logits[row.prompt.numel() - 1 : row.prompt.numel() - 1 + r] / tau
            want = logits.log_softmax(-1).gather(1, row.response[:, None])[:, 0]
            torch.testing.assert_close(got[:r], want, atol=1e-5, rtol=0)


def _bad_inputs(rank: int, world: int, *, path: str) -> list[str]:
    """Each bad input on the last rank only; every rank must see its message and go on."""
    from longstraw_backend.workers.verl.standalone import build_engine, ppo_batch

    engine = build_engine("longstraw", path, options=OPTIONS | {"max_prompt_tokens": 60})
    good, at_limit = _rows(), _rows([(60, 3), (50, 2)])
    strange = _rows([(50, 3), (50, 2)])
    strange[0].response[1] = 311
    bad = [
        ppo_batch(at_limit),
        ppo_batch(strange),
        ppo_batch(good, temperature=0.0),
        ppo_batch(good, distillation_use_topk=True),
    ]
    messages = []
    for batch in bad:
        with engine.eval_mode(), pytest.raises(ValueError) as caught:
            engine.infer_batch(batch if rank == world - 1 else ppo_batch(good))
        messages.append(str(caught.value))
    with engine.eval_mode():
        engine.infer_batch(ppo_batch(good))
    return messages


def test_bad_input_on_one_rank_is_an_error_on_all(model_path: str, tmp_path: Path) -> None:
    first, second = run_ranks(_bad_inputs, 2, tmp_path, path=model_path)
    assert first == second
    for message, part in zip(
        first,
        [
            "data.max_prompt_length: the prompt of row 0 has 60",
            "token ids",
            "temperature",
            "distill",
        ],
        strict=True,
    ):
        assert part in message and "rank 1" in message


def _checkpoint(rank: int, world: int, *, path: str, folder: str) -> Any:
    from verl.workers.utils.losses import ppo_loss

    from longstraw_backend.workers.verl.standalone import actor_config, build_engine, ppo_batch

    rows = _rows()
    mine = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
    loss = partial(ppo_loss, config=actor_config())

    def step(engine: Any) -> float:
        with engine.train_mode():
            batch = ppo_batch(mine, global_rows=len(rows))
            return float(engine.train_batch(batch, loss)["metrics"]["grad_norm"])

    engine = build_engine("longstraw", path, options=OPTIONS)
    step(engine)
    engine.save_checkpoint(folder)
    went_on = [step(engine), step(engine)]
    resumed = build_engine("longstraw", path, options=OPTIONS)
    resumed.load_checkpoint(folder, del_local_after_load=False)
    return went_on, [step(resumed), step(resumed)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_checkpoint_continues_with_the_same_numbers(
    model_path: str, tmp_path: Path, world: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    for went_on, resumed in run_ranks(
        _checkpoint, world, tmp_path / "out", path=model_path, folder=folder
    ):
        assert resumed == went_on


def _generate(rank: int, world: int, *, path: str) -> Any:
    from longstraw_backend.walk import Sampling
    from longstraw_backend.workers.verl.standalone import build_engine, ppo_batch

    engine = build_engine("longstraw", path, options=OPTIONS)
    row = _rows()[0]
    samplings = [Sampling(6, 0.8), Sampling(3, 0.8, top_k=5), Sampling(9, 0.0)]
    samples = engine.generate(row.prompt.tolist(), samplings, seed=3)
    captured = engine.meter.prompt_tokens_captured
    scored = []
    for sample in samples:
        fields = dict(response=torch.tensor(sample.token_ids))
        for name in ("old_log_probs", "advantages", "ref_log_prob"):
            fields[name] = torch.zeros(len(sample.token_ids))
        with engine.eval_mode():
            out = engine.infer_batch(ppo_batch([type(row)(row.prompt, **fields)], temperature=0.8))
        scored.append(out["model_output"]["log_probs"].values()[:-1].tolist())
    return samples, scored, captured, engine.meter.prompt_tokens_captured


@pytest.mark.parametrize("world", [1, 2])
def test_rollout_shares_its_capture_with_scoring(
    model_path: str, tmp_path: Path, world: int
) -> None:
    results = run_ranks(_generate, world, tmp_path, path=model_path)
    samples, scored, captured, captured_after = results[0]
    assert [len(s.token_ids) for s in samples] == [6, 3, 9]
    assert samples[0].log_probs == pytest.approx(scored[0], abs=1e-4)
    assert captured == captured_after == 49
    assert all(r[0] == samples for r in results)
