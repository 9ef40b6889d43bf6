"""A failure of one rank in the middle of a step reaches all ranks, with its message.

The others wait in a collective that the failed rank never enters. So a rank that raises leaves a
note in the process group's store and breaks its groups, and ranks that fail because of that find
the note. The first note wins: it is the cause, whatever follows from it.

How the others learn of it:

    gloo    a group is broken by letting a receive time out: gloo then closes the rank's connections
            of that group, and whoever waits for it gets an error at once, and passes it on.
            ``abort()`` does nothing there.
    NCCL    a kernel that waits for a peer doesn't notice that it is gone. A thread on each rank
            looks for a note every second while a step runs, and aborts the communicators.

A killed process leaves no note. Under gloo its connections close, and the others raise and say who
is missing. Under NCCL they wait until the group's timeout, when torch ends their processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from threading import Event, Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .lockstep import Agreed

__all__ = ["Alarm", "armed"]

Method = TypeVar("Method", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

_NOTE, _SEEN = "longstraw/failure", "longstraw/failed/{}"
_PATIENCE = timedelta(seconds=5)  # for the others to report, once a step has failed
_PERIOD = 1.0  # seconds between two looks for a note
_UNUSED_TAG = 0x10_57


class Alarm:
    """The ranks of ``group``, which fail together.

    Args:
        group: the default one; with None this rank is alone and may go on after a failure.
        watch: look for notes in a thread, as NCCL needs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, watch: bool = False) -> None:
        self.group = group
        self.watch = watch
        self.failure: str | None = None
        self._watched: Any = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Work that may fail on one rank. A failure breaks all process groups of this process:
        afterwards nothing can run here, the run has to start again from a checkpoint.

        Errors that all ranks raise together, :class:`Agreed`, break nothing.

        Raises:
            RuntimeError: another rank failed, with its number and message, or is gone; or a rank
                did in earlier work.
        """
        if self.group is None:
            yield
            return
        if self.failure is not None:
            raise RuntimeError(f"{self.failure}; restart the run from its last checkpoint")
        try:
            with self._watching() as noticed:
                yield
                if noticed.is_set():  # kernels were cut short: what they left is no result
                    raise RuntimeError("another rank failed")
        except Agreed:
            raise
        except BaseException as error:
            own = f"rank {dist.get_rank(self.group)}: {type(error).__name__}: {error}"
            self.failure, missing = self._spread(own)
            if self.failure == own and not missing:
                raise
            raise RuntimeError(f"{self.failure}{missing}") from error

    def _spread(self, own: str) -> tuple[str, str]:
        """The first failure of all ranks, and who doesn't answer."""
        assert self.group is not None
        store, rank = self.group.get_group_store(), dist.get_rank(self.group)
        first = own
        try:
            first = store.compare_set(_NOTE, "", own).decode()
            store.set(_SEEN.format(rank), "")
        except RuntimeError:
            logger.exception("the process group's store can't be reached")
        _break_groups()
        keys = {r: _SEEN.format(r) for r in range(dist.get_world_size(self.group))}
        with suppress(RuntimeError):
            store.wait(list(keys.values()), _PATIENCE)
            return first, ""
        try:
            missing = [r for r, key in keys.items() if not store.check([key])]
        except RuntimeError:
            return first, " (the rank that keeps the store, the first by default, is gone)"
        return first, f" (no sign of rank {missing}: killed, unreachable or still busy)"

    @contextmanager
    def _watching(self) -> Iterator[Event]:
        """Set if a note was found; the groups are broken then."""
        noticed, done = Event(), Event()
        if not self.watch:
            yield noticed
            return
        thread = Thread(target=self._look, args=(noticed, done), daemon=True)
        thread.start()
        try:
            yield noticed
        finally:
            done.set()
            thread.join()

    def _look(self, noticed: Event, done: Event) -> None:
        assert self.group is not None
        try:
            if self._watched is None:  # a connection of its own: the other may be waiting
                store: Any = self.group.get_group_store()
                self._watched = store.clone()
            while not self._watched.check([_NOTE]):
                if done.wait(_PERIOD):
                    return
            note = self._watched.get(_NOTE).decode()
        except RuntimeError as error:
            note = f"the process that keeps the store is gone: {error}"
        noticed.set()
        logger.error("a step failed: %s", note)
        _break_groups()


def armed(method: Method) -> Method:
    """A method that runs with ``self.alarm`` armed."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.alarm.armed():
            return method(self, *args, **kwargs)

    return cast(Method, guarded)


def _break_groups() -> None:
    """Let all collectives of this process fail, also those under way; with gloo those of its peers
    that wait for it."""
    rank = dist.get_rank()
    for group in list(dist.distributed_c10d._world.pg_names):
        with suppress(RuntimeError):
            group.abort()
        for peer in dist.get_process_group_ranks(group):
            if peer != rank:
                with suppress(RuntimeError):  # it must time out
                    waiting = dist.irecv(torch.empty(1), peer, group=group, tag=_UNUSED_TAG)
                    if waiting is not None:
                        waiting.wait(timedelta(milliseconds=1))
