"""The replay buffer that keeps the responses of a prompt together on their way to the trainer.

verl's own buffer returns rows in the order in which sessions finished, and the trainer then
balances them row by row over the ranks; either breaks groups, and a prompt would be captured once
per fragment. The engine is correct with any order, so this is about speed alone. Use:

    trainer.v1.sampler.custom_sampler.path=pkg://longstraw_backend.workers.verl.sampler
    trainer.v1.sampler.custom_sampler.name=GroupedReplayBuffer

verl does not hand its own sampler arguments to a custom one; they come through
`trainer.v1.sampler.sampler_kwargs` (the overlay `+longstraw=grouped` interpolates them all), and
settings that would be lost without a trace are an error. Only the synchronous trainer is served.

A batch that verl pads (its row count is no multiple of the mini-batch) is balanced by verl again:
groups are split for that step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from longstraw_backend.workers.verl.dealing import RowGroup, deal, imbalance
from longstraw_backend.workers.verl.failures import raise_reported

__all__ = ["GroupedKVBatchMeta", "GroupedReplayBuffer"]

_KNOWN_KWARGS = {
    "dp_size",
    "filter_groups",
    "poll_interval",
    "sync_refill_failed_groups",
    "train_batch_size",
}


class GroupedKVBatchMeta(KVBatchMeta):
    """A batch whose order stands: the trainer's row-wise balancing must not mix groups."""

    def reorder(self, indexes: list[int]) -> None:
        """Keep the order the sampler chose; see `dealing`."""


def split_key(key: str) -> tuple[str, int, int]:
    """(uid, session, index) of a trajectory key `{uid}_{session}_{index}`."""
    uid, session, index = key.rsplit("_", 2)
    return uid, int(session), int(index)


def group_rows(
    keys: Sequence[str], row_tokens: Sequence[int], uid_order: Iterable[str]
) -> list[RowGroup]:
    """Rows by prompt, prompts in dataset order (unknown ones last), rows by session.

    The order must not depend on timing or on the random uids: a resumed run should sum its
    gradients in the order of the uninterrupted one.
    """
    position = {uid: i for i, uid in enumerate(uid_order)}
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(split_key(key)[0], []).append(row)
    groups = []
    for uid in sorted(rows_of, key=lambda uid: (position.get(uid, len(position)), uid)):
        rows = sorted(rows_of[uid], key=lambda row: split_key(keys[row]))
        groups.append(RowGroup(tuple(rows), sum(row_tokens[row] for row in rows)))
    return groups


def buffer_arguments(sampler_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of verl's buffer from `sampler_kwargs`.

    Raises:
        ValueError: an unknown name, or group filtering without a metric.
    """
    unknown = sorted(set(sampler_kwargs) - _KNOWN_KWARGS)
    if unknown:
        raise ValueError(
            f"trainer.v1.sampler.sampler_kwargs has unknown names {unknown}; "
            f"known are {sorted(_KNOWN_KWARGS)}"
        )
    arguments = {
        name: sampler_kwargs[name]
        for name in ("poll_interval", "sync_refill_failed_groups", "train_batch_size")
        if sampler_kwargs.get(name) is not None
    }
    arguments["gen_batch_size"] = sampler_kwargs.get("train_batch_size")
    filter_groups = sampler_kwargs.get("filter_groups") or {}
    if filter_groups.get("enable"):
        arguments |= _filter_arguments(filter_groups, sampler_kwargs)
    if filter_groups.get("enable") or arguments.get("sync_refill_failed_groups"):
        arguments["gen_batch_size"] = 1
    return arguments


def _filter_arguments(
    filter_groups: Mapping[str, Any], sampler_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    if not filter_groups.get("metric"):
        raise ValueError("algorithm.filter_groups.metric must be set when filtering is enabled")
    if sampler_kwargs.get("train_batch_size") is None:
        raise ValueError(
            "trainer.v1.sampler.sampler_kwargs.train_batch_size must be set for filter_groups: "
            "it bounds the prompts in flight; set it to ${data.train_batch_size}"
        )
    return {
        "filter_groups_metric": str(filter_groups["metric"]),
        "max_inflight_gen_batches": filter_groups.get("max_inflight_gen_batches", 1),
    }


def check_nothing_lost(trainer_config: Any, arguments: Mapping[str, Any]) -> None:
    """Compare what reached the sampler with what the run's configuration asks for.

    Args:
        trainer_config: the whole configuration, or None where the trainer does not show it.
    Raises:
        ValueError: group filtering or refilling is on but did not arrive.
    """
    if trainer_config is None:
        return
    lost = {}
    filter_groups = trainer_config.algorithm.get("filter_groups") or {}
    if filter_groups.get("enable") and "filter_groups_metric" not in arguments:
        lost["filter_groups"] = "algorithm.filter_groups"
    sampler = trainer_config.trainer.v1.sampler
    refill = sampler.get("sync_refill_failed_groups")
    if refill and not arguments.get("sync_refill_failed_groups"):
        lost["sync_refill_failed_groups"] = "trainer.v1.sampler.sync_refill_failed_groups"
    if lost:
        remedy = " ".join(
            f"'+trainer.v1.sampler.sampler_kwargs.{name}=${{{source}}}'"
            for name, source in lost.items()
        )
        raise ValueError(
            f"{', '.join(lost.values())} is on, but verl does not pass it to a custom sampler and "
            f"it would be ignored; use +longstraw=grouped, or add {remedy} "
            "'+trainer.v1.sampler.sampler_kwargs.train_batch_size=${data.train_batch_size}'"
        )


class GroupedReplayBuffer(ReplayBuffer):
    """verl's synchronous buffer, returning whole groups dealt evenly over the ranks."""

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Mapping[str, Any] | None = None,
        refill_fn: Any = None,
    ) -> None:
        if trainer_mode != "sync":
            raise ValueError(
                f"GroupedReplayBuffer serves trainer.v1.trainer_mode=sync, got {trainer_mode!r}; "
                "leave trainer.v1.sampler.custom_sampler unset with the asynchronous trainers"
            )
        sampler_kwargs = sampler_kwargs or {}
        arguments = buffer_arguments(sampler_kwargs)
        self._trainer = getattr(refill_fn, "__self__", None)
        check_nothing_lost(getattr(self._trainer, "config", None), arguments)
        self._dp_size = sampler_kwargs.get("dp_size")
        self._metrics: dict[str, float] = {}
        super().__init__(
            trainer_mode=trainer_mode,
            trainer_config=trainer_config,
            max_off_policy_threshold=max_off_policy_threshold,
            max_off_policy_strategy=max_off_policy_strategy,
            sampler_kwargs=sampler_kwargs,
            refill_fn=refill_fn,
            **arguments,
        )

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's sampling, plus how evenly the tokens were dealt."""
        batch, metrics = super().sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        return batch, metrics | self._metrics

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        raise_reported(self.partitions)

    def _materialize_batch(
        self,
        partition_id: str,
        selected_prompt_uids: list[str],
        partition_snapshot: dict[str, dict[str, Any]],
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        self._metrics = {}
        if partition_id == "val" or len(batch) == 0:
            return batch
        row_tokens = [tag["seq_len"] for tag in batch.tags]
        groups = group_rows(batch.keys, row_tokens, self.prompt_global_steps[partition_id])
        shares = self._shares(groups, len(batch))
        if len(shares) > 1:
            self._metrics = {"longstraw/sampler/token_imbalance": imbalance(shares, row_tokens)}
        order = [row for rows in shares for row in rows]
        return GroupedKVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[row] for row in order],
            tags=[batch.tags[row] for row in order],
        )

    def _shares(self, groups: list[RowGroup], num_rows: int) -> list[list[int]]:
        """Deal over the ranks; a batch that verl is going to pad is left in one piece."""
        num_ranks = self._num_ranks()
        return deal(groups, num_ranks if num_rows % num_ranks == 0 else 1)

    def _num_ranks(self) -> int:
        """The data-parallel size: as configured, else what the trainer's own balancing uses."""
        if self._dp_size is None:
            workers = getattr(self._trainer, "actor_rollout_wg", None)
            mapping = workers._query_dispatch_info("actor") if workers is not None else [0]
            self._dp_size = max(mapping) + 1
        return int(self._dp_size)
