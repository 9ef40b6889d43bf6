"""The `longstraw` rollout inside the hybrid worker: it decodes with the trained module itself.

verl normally copies the weights to an inference engine after every step. Here nothing is copied:
the engine that trains also generates, so rollout and trainer agree to rounding, no second copy of
the weights exists, and the prompt captured for the rollout serves the log-probs and the update.

With a stock actor strategy (fsdp2) there is no LongStraw engine in the process; the same rollout
then decodes with that engine's module through plain `transformers`, so that strategies can be
compared with everything else equal.

Refuses: more than one replica (`tensor_model_parallel_size` must be the world size, since every
decoding step is a collective over all ranks), and rollouts in other processes than the trainer's.
"""

import hashlib
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from longstraw_backend.walk.decode import Sample, Sampling
from longstraw_backend.workers.verl.live import LIVE
from longstraw_backend.workers.verl.rollout_model import generate_with_stock_module
from longstraw_backend.workers.verl.rollout_requests import Limits

__all__ = [
    "GroupAnswer",
    "GroupRequest",
    "LongStrawServerAdapter",
    "generate_in_worker",
    "limits_in_worker",
]


@dataclass(frozen=True)
class GroupRequest:
    """Responses wanted of one prompt, in one call. Token ids travel as int32, [P]."""

    prompt_ids: np.ndarray
    samplings: tuple[Sampling, ...]


@dataclass(frozen=True)
class GroupAnswer:
    """One sample per sampling, and the weights' version they came from."""

    samples: list[Sample]
    global_steps: int | None


def check_one_replica(config: RolloutConfig, world_size: int) -> None:
    """Refuse a rollout layout that would dead-lock the trained module.

    Raises:
        ValueError: the replica does not span exactly all ranks.
    """
    layout = (
        config.tensor_model_parallel_size,
        config.data_parallel_size,
        config.pipeline_model_parallel_size,
    )
    if layout != (world_size, 1, 1):
        raise ValueError(
            "rollout (tensor_model_parallel_size, data_parallel_size, "
            f"pipeline_model_parallel_size) must be ({world_size}, 1, 1) with "
            f"rollout.name=longstraw, got {layout}: it decodes with the trained module, which all "
            f"{world_size} ranks hold together; set "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={world_size}"
        )


def check_options(config: RolloutConfig) -> None:
    """Refuse rollout options that would silently be ignored."""
    if not config.do_sample:
        raise ValueError(
            "rollout.do_sample=False is not supported by rollout.name=longstraw; "
            "set rollout.temperature=0 for greedy responses"
        )
    if config.enable_rollout_routing_replay:
        raise ValueError(
            "rollout.enable_rollout_routing_replay is not supported by rollout.name=longstraw, "
            "whose rollout and trainer share one module and route alike; set it to False"
        )


def _as_ids(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def run_limits(config: RolloutConfig, model_config: HFModelConfig) -> Limits:
    """Bounds and end tokens; models may name several end tokens in their generation config."""
    ends = _as_ids(getattr(model_config.generation_config, "eos_token_id", None))
    ends |= _as_ids(getattr(model_config.tokenizer, "eos_token_id", None))
    return Limits(
        response_length=config.response_length,
        max_model_len=config.max_model_len,
        eos_token_ids=() if config.ignore_eos else tuple(sorted(ends)),
    )


class LongStrawServerAdapter(BaseRollout):
    """The worker's end of the rollout: answers whole groups, keeps the weights' version."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, model_config, device_mesh, **kwargs)
        check_one_replica(self.config, dist.get_world_size() if dist.is_initialized() else 1)
        check_options(self.config)
        self.limits = run_limits(self.config, self.model_config)
        self.global_steps: int | None = None
        self._drawn: Counter[bytes] = Counter()
        self._tell_prompt_limit()
        LIVE["rollout"] = self

    def _tell_prompt_limit(self) -> None:
        """Let the engine refuse cut prompts also under verl's stock actor config."""
        engine = LIVE.get("actor")
        if engine is not None and engine.max_prompt_tokens is None:
            engine.max_prompt_tokens = self.config.prompt_length

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Note the version; the weights are already here, so they are not even read."""
        if hasattr(weights, "close"):
            weights.close()
        self.global_steps = global_steps
        self._drawn.clear()

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release: prompt states outlive the rollout, the trainer reuses them."""

    def generate_group(self, worker: Any, request: GroupRequest) -> GroupAnswer | None:
        """All responses of a request, on every rank alike; only rank 0 returns them.

        Args:
            worker: the hybrid worker, to reach a stock engine's module.
            request: equal on all ranks.
        """
        seed = self._next_seed(request)
        prompt_ids, samplings = request.prompt_ids.tolist(), list(request.samplings)
        engine = LIVE.get("actor")
        if engine is not None:
            samples = engine.generate(prompt_ids, samplings, seed)
        else:
            engine = stock_engine(worker)
            with engine.eval_mode():
                samples = generate_with_stock_module(engine.module, prompt_ids, samplings, seed)
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        return GroupAnswer(samples, self.global_steps)

    def _next_seed(self, request: GroupRequest) -> int:
        """A seed from (run, weights' version, prompt, responses already drawn of this prompt).

        Equal on all ranks, and the same after a resume, whatever the order of the prompts.
        """
        prompt = hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=16).digest()
        text = f"{self.config.seed}/{self.global_steps}/{self._drawn[prompt]}/".encode() + prompt
        self._drawn[prompt] += len(request.samplings)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def stock_engine(worker: Any) -> Any:
    """The actor's engine in a hybrid worker that runs another strategy than ours.

    Raises:
        RuntimeError: the worker holds no actor.
    """
    for role in [worker, *getattr(worker, "worker_dict", {}).values()]:
        actor = getattr(role, "actor", None)
        if actor is not None:
            return actor.engine
    raise RuntimeError(
        f"no actor engine in {type(worker).__name__}: rollout.name=longstraw needs the hybrid "
        "worker of actor_rollout_ref.hybrid_engine=True"
    )


def generate_in_worker(worker: Any, request: GroupRequest) -> GroupAnswer | None:
    """Run by Ray inside each hybrid worker on behalf of the server."""
    return LIVE["rollout"].generate_group(worker, request)


def limits_in_worker(worker: Any) -> Limits:
    """Run by Ray inside one hybrid worker when the server starts."""
    return LIVE["rollout"].limits
