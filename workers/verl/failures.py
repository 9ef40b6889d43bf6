"""Errors of the user's making end the run instead of thinning out the batch.

verl's agent-loop worker logs an exception of a session, marks its prompt as failed and goes on:
the trainer pads the missing rows and trains on. For a passing fault that is right; for a prompt
that can never fit it hides the mistake for the whole run. So the agent loop leaves a note where the
trainer looks anyway, in the TransferQueue, and the sampler raises it in the trainer's process.
"""

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq

PARTITION = "longstraw_failures"


async def report_failure(key: str, error: ValueError) -> None:
    """Leave a note about `error`; `key` only has to tell it from other notes."""
    await tq.async_kv_put(key=key, partition_id=PARTITION, tag={"message": str(error)})


def raise_reported(partitions: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise the first note found among the partitions' tags; silent when there is none."""
    notes = [tag["message"] for tag in partitions.get(PARTITION, {}).values() if "message" in tag]
    if notes:
        raise ValueError(f"the rollout refused {len(notes)} request(s); the first: {notes[0]}")
