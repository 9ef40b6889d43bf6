"""The server side of the `longstraw` rollout: a thin Ray actor and verl's handle on it.

verl's agent loops talk to a server actor. This one holds no model: it gathers the requests of a
prompt (see `gathering`), and has every worker of the replica answer them inside the trainer's own
process, one group at a time, because each decoding step is a collective over all of them.

The call occupies the worker until the group is done, which is fine for the synchronous trainer and
refused for the asynchronous ones, where training and rollout overlap.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import ray
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from longstraw_backend.walk.decode import Sample, Sampling
from longstraw_backend.workers.verl.gathering import Gathering
from longstraw_backend.workers.verl.rollout import (
    GroupAnswer,
    GroupRequest,
    generate_in_worker,
    limits_in_worker,
)
from longstraw_backend.workers.verl.rollout_requests import (
    Limits,
    read_sampling,
    refuse_media,
    wants_log_probs,
)

__all__ = ["LongStrawReplica", "LongStrawServer"]

# Siblings start together and differ by one event-loop turn; under load Ray may hold one back.
GATHER_SECONDS = 0.2


@dataclass(eq=False)
class _Request:
    """One response wanted; `answered` gets the group's task and this request's place in it."""

    prompt_ids: np.ndarray
    sampling: Sampling
    answered: "asyncio.Future[tuple[asyncio.Task[GroupAnswer], int]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def token_output(sample: Sample, log_probs: bool, global_steps: int | None) -> TokenOutput:
    """verl's reply; the trainer reads `global_steps` from the extra fields."""
    return TokenOutput(
        token_ids=sample.token_ids,
        log_probs=sample.log_probs if log_probs else None,
        stop_reason="completed",
        extra_fields={"global_steps": global_steps, "finish_reason": sample.stop_reason},
    )


class LongStrawServer:
    """Gathers requests and has all workers of the replica answer them.

    Args:
        workers: Ray handles of the hybrid workers, rank 0 first.
        limits: bounds on responses.
        group_size: `rollout.n`.
    """

    def __init__(self, workers: list[Any], limits: Limits, group_size: int) -> None:
        self._workers = workers
        self._limits = limits
        self._waiting: Gathering[_Request] = Gathering(group_size, GATHER_SECONDS)
        self._arrival = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One response to token ids; verl calls this once per response."""
        refuse_media({"images": image_data, "videos": video_data, "audio": audio_data})
        ids = np.asarray(normalize_token_ids(prompt_ids), dtype=np.int32)
        sampling = read_sampling(sampling_params, len(ids), self._limits)
        request = _Request(ids, sampling)
        self._waiting.add(ids.tobytes(), request, time.monotonic())
        self._arrival.set()
        self._keep_dispatching()
        task, place = await request.answered
        answer = await asyncio.shield(task)
        return token_output(
            answer.samples[place], wants_log_probs(sampling_params), answer.global_steps
        )

    def _keep_dispatching(self) -> None:
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.ensure_future(self._dispatch())

    async def _dispatch(self) -> None:
        """Answer groups one after another until nobody waits."""
        while (seconds := self._waiting.wait(time.monotonic())) is not None:
            group = self._waiting.take(time.monotonic())
            if group is None:
                await self._newcomer(seconds)
                continue
            task = asyncio.ensure_future(self._answer(group))
            for place, request in enumerate(group):
                if not request.answered.done():  # its caller may have gone
                    request.answered.set_result((task, place))
            await asyncio.wait({task})  # a failure reaches the requests that await the task

    async def _newcomer(self, seconds: float) -> None:
        """Wait for a request to arrive, at most `seconds`."""
        self._arrival.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrival.wait(), seconds)

    async def _answer(self, group: list[_Request]) -> GroupAnswer:
        request = ray.put(
            GroupRequest(group[0].prompt_ids, tuple(member.sampling for member in group))
        )
        calls = [w.__ray_call__.remote(generate_in_worker, request) for w in self._workers]
        return (await asyncio.gather(*calls))[0]

    async def wake_up(self) -> None:
        """The trained module never sleeps."""

    async def sleep(self) -> None:
        """The trained module never sleeps; prompt states stay for the trainer."""

    async def clear_kv_cache(self) -> None:
        """Prompt states are keyed by the weights' version and need no clearing."""

    async def release_kv_cache(self) -> None:
        """See `sleep`."""

    async def resume_kv_cache(self) -> None:
        """See `sleep`."""

    async def abort_all_requests(self, reject_request: bool = False) -> NoReturn:
        """Only the asynchronous trainers interrupt generation."""
        raise NotImplementedError(
            "rollout.name=longstraw serves trainer.v1.trainer_mode=sync: it decodes in the "
            "trainer's own process and cannot be interrupted; use rollout.name=vllm otherwise"
        )

    async def resume_generation(self) -> None:
        """Nothing was interrupted."""

    async def start_profile(self, **kwargs: Any) -> None:
        """The work happens in the workers, which verl profiles itself."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""


class LongStrawReplica(RolloutReplica):
    """verl's handle on the one server, which spans all ranks of the trainer."""

    def rollout_worker_use_gpu(self) -> bool:
        return False

    async def launch_servers(self) -> None:
        """Start the server actor next to the driver; it needs no resources of its own."""
        if self.rollout_mode != RolloutMode.HYBRID:
            raise ValueError(
                f"rollout.name=longstraw runs in hybrid mode only, got {self.rollout_mode}: it "
                "decodes with the trained module; use rollout.name=vllm for separate rollouts"
            )
        limits = await self.workers[0].__ray_call__.remote(limits_in_worker)
        server = (
            ray.remote(num_cpus=0)(LongStrawServer)
            .options(
                name=f"longstraw_server_{self.replica_rank}{self.name_suffix}",
                max_concurrency=self.max_concurrency,
            )
            .remote(self.workers, limits, self.config.n)
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"longstraw-{self.replica_rank}"
