"""Where state rests, and what the store counts of it. Without a GPU both places are one memory."""

from __future__ import annotations

import pytest
import torch

from longstraw_backend.state import (
    KVPages,
    LayerState,
    Placement,
    PromptKey,
    PromptStore,
    RecurrentState,
    Segment,
    TokenPages,
)
from longstraw_backend.state.placement import bytes_of, room_for

KV_BYTES, STATE_BYTES = 2 * 3 * 4, (3 + 4) * 4


class Latents(TokenPages):
    """Pages of a family that says nothing about its kind."""


def test_each_kind_rests_where_it_is_told() -> None:
    kinds: dict[str, type[LayerState]] = {
        "attention": KVPages,
        "latent": Latents,
        "recurrent": RecurrentState,
    }
    for kind, cls in kinds.items():
        for asked in kinds:
            state = cls(3, 2, Placement(frozenset({asked})))  # type: ignore[call-arg, arg-type]
            assert state.kind == kind and state.on_host == (asked == kind)
        assert not cls(3, 2).on_host  # type: ignore[call-arg]


def hybrid(*host: str, staging: str = "segments") -> Segment:
    """A layer of attention and one of a delta net, after three tokens."""
    placement = Placement(frozenset(host), staging)  # type: ignore[arg-type]
    layers = [KVPages(3, 100, placement), RecurrentState(3, 100, placement)]
    segment = Segment(layers, 3, staging=placement.staging)
    segment.write(0, *(torch.ones(1, 1, 3, 1) for _ in range(2)))
    segment.write(1, torch.ones(1, 1, 3), torch.ones(1, 1, 2, 2))
    segment.commit(3)
    return segment


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ((), 0),
        (("attention",), KV_BYTES),
        (("recurrent", "latent"), STATE_BYTES),
        (("attention", "recurrent"), KV_BYTES + STATE_BYTES),
    ],
)
def test_bytes_are_told_by_place(host: tuple[str, ...], expected: int) -> None:
    segment = hybrid(*host)
    assert (segment.nbytes, segment.host_nbytes) == (KV_BYTES + STATE_BYTES, expected)


def test_what_is_seen_does_not_depend_on_the_place() -> None:
    for here, there in zip(hybrid().layers, hybrid("attention", "recurrent").layers, strict=True):
        for a, b in zip(here.visible(3), there.visible(3), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_recurrent_state_on_the_host_is_a_copy() -> None:
    state, conv = RecurrentState(placement=Placement(frozenset({"recurrent"}))), torch.ones(1, 1, 3)
    state.write(0, conv, torch.ones(1, 1, 2, 2))
    state.commit(1, 1)
    conv.zero_()
    assert state.visible(1)[0].conv.all()


def test_a_branch_rests_on_the_device_and_stages_as_its_root() -> None:
    with hybrid("attention", "recurrent", staging="layer").branch(2) as branch:
        assert not any(layer.on_host for layer in branch.layers)
        assert branch.staging == "layer"
        branch.write(0, *(torch.ones(1, 1, 1, 1) for _ in range(2)))
        assert branch.nbytes > 0 and branch.host_nbytes == 0


@pytest.mark.parametrize(
    ("budgets", "kept"),
    [
        ((2 * STATE_BYTES, 2 * KV_BYTES), 2),
        ((2 * STATE_BYTES, 9 * KV_BYTES), 2),
        ((9 * STATE_BYTES, 2 * KV_BYTES), 2),
        ((9 * STATE_BYTES, 9 * KV_BYTES), 3),
        ((9 * STATE_BYTES, 0), 1),
        ((0, float("inf")), 1),
    ],
)
def test_the_store_keeps_both_budgets(budgets: tuple[float, float], kept: int) -> None:
    store = PromptStore(*budgets)
    for name in (b"a", b"b", b"c"):
        store.put(PromptKey(name, 0), hybrid("attention"))
    assert len(store) == kept and store.get(PromptKey(b"c", 0)) is not None
    assert (store.nbytes, store.host_nbytes) == (kept * (KV_BYTES + STATE_BYTES), kept * KV_BYTES)


def test_ordinary_memory_counts_as_it_is() -> None:
    room = room_for((3, 5), like=torch.zeros(1, dtype=torch.bfloat16), host=True)
    assert room.dtype == torch.bfloat16 and not room.is_pinned() and bytes_of(room) == 30
