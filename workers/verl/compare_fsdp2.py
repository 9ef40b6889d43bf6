"""One batch through verl's stock fsdp2 engine, for ``longstraw compare --against verl-fsdp2``.

    python -m longstraw_backend.workers.verl.compare_fsdp2 SENT RECEIVED

Runs alone in its process, as rank 0 of 1. Nothing of LongStraw touches the model here: the engine,
its micro batches of one row and its gradients are verl's own.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl  # noqa: F401  (chooses the platform before any engine module is imported)
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.workers.utils.padding import response_from_nested

from longstraw_backend.compare.sides import measured
from longstraw_backend.oracle import gradients_of
from longstraw_backend.workers.verl.standalone import PPORow, build_engine, ppo_batch

__all__ = ["run_task"]


def _engine(task: dict[str, Any]) -> Any:
    engine = build_engine(
        "fsdp2",
        task["model"],
        lora_rank=task["lora"],
        lora_alpha=2 * task["lora"],
        checkpointing=False,
    )
    _load_adapters(engine.module, task["adapters"])
    return engine


def _load_adapters(module: torch.nn.Module, adapters: dict[str, Tensor]) -> None:
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if adapters and trainable.keys() != adapters.keys():
        raise ValueError(
            f"adapters: expected {sorted(trainable)[:2]}..., got {sorted(adapters)[:2]}..."
        )
    with torch.no_grad():
        for name, value in adapters.items():
            p = trainable[name]
            value = value.to(p.device)
            if isinstance(p, DTensor):
                value = distribute_tensor(value, p.device_mesh, p.placements)
            p.copy_(value)


def _batch(task: dict[str, Any]) -> TensorDict:
    rows = []
    for (prompt, response), weights in zip(task["rows"], task["weights"], strict=True):
        unused = torch.zeros_like(weights)
        rows.append(PPORow(prompt, response, unused, weights, unused))
    return ppo_batch(rows, temperature=task["temperature"], entropy=True, return_model_output=True)


def _loss(task: dict[str, Any]) -> Any:
    """The objective of ``longstraw_backend.oracle`` as a loss function of verl."""
    bonus = task["entropy_coeff"] / sum(w.numel() for w in task["weights"])

    def loss(
        model_output: Any, data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["response_mask"]
        log_probs, entropy = (
            response_from_nested(model_output[name], mask).values()
            for name in ("log_probs", "entropy")
        )
        weights = data["advantages"].values().to(log_probs)
        return -(weights * log_probs).sum() - bonus * entropy.sum(), {}

    return loss


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward of all rows; losses, per-row values and whole gradients by name.

    Args:
        task: as ``longstraw_backend.compare.verl_fsdp2`` writes it.
    """
    engine, loss = _engine(task), _loss(task)
    data = _batch(task).to(task["device"])

    def work() -> Any:
        engine.optimizer_zero_grad()
        return engine.forward_backward_batch(data, loss, forward_only=False)

    with engine.train_mode():
        side = measured(work, torch.device(task["device"]))
        gradients = {name: _full(g) for name, g in gradients_of(engine.module).items()}
    output = side.result["model_output"]
    mask = data["response_mask"]
    named = [response_from_nested(output[n], mask).unbind() for n in ("log_probs", "entropy")]
    return {
        "loss": float(sum(side.result["loss"])),
        "rows": [(a.detach().cpu(), b.detach().cpu()) for a, b in zip(*named, strict=True)],
        "gradients": gradients,
        "seconds": side.seconds,
        "peak_bytes": side.peak_bytes,
    }


def main(sent: str, received: str) -> None:
    """Read a task, run it, write the answer."""
    task = torch.load(sent, weights_only=True)
    backend = "gloo" if task["device"] == "cpu" else "nccl"
    meeting = Path(received).with_name("rendezvous").absolute()
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    torch.save(run_task(task), received)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
