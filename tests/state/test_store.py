"""The store of prompt states: least recently used under a budget, never stale."""

from __future__ import annotations

import torch

from longstraw_backend.state import KVPages, PromptKey, PromptStore, Segment

BYTES = 2 * 3 * 4  # k and v of three tokens, one head of dim 1, float32


def state(tokens: int = 3) -> Segment:
    segment = Segment([KVPages(tokens, 100)], tokens)
    segment.write(0, *(torch.zeros(1, 1, tokens, 1) for _ in range(2)))
    segment.commit(tokens)
    return segment


def key(name: str, version: int = 0, adapters: bool = True) -> PromptKey:
    return PromptKey(name.encode(), version, adapters)


def filled(budget: int, *names: str) -> PromptStore:
    store = PromptStore(budget)
    for name in names:
        store.put(key(name), state())
    return store


def held(store: PromptStore, *names: str) -> list[bool]:
    return [store.get(key(name)) is not None for name in names]


def test_returns_the_very_state_it_was_given() -> None:
    store, kept = PromptStore(10 * BYTES), state()
    assert store.get(key("a")) is None
    store.put(key("a"), kept)
    assert store.get(key("a")) is kept


def test_evicts_the_oldest_beyond_the_budget() -> None:
    store = filled(2 * BYTES, "a", "b", "c")
    assert held(store, "a", "b", "c") == [False, True, True]
    assert store.nbytes == 2 * BYTES and len(store) == 2


def test_a_state_just_used_is_evicted_last() -> None:
    store = filled(2 * BYTES, "a", "b")
    assert store.get(key("a")) is not None
    store.put(key("c"), state())
    assert held(store, "a", "b", "c") == [True, False, True]


def test_asking_for_what_is_missing_changes_nothing() -> None:
    store = filled(2 * BYTES, "a", "b")
    assert store.get(key("z")) is None
    store.put(key("c"), state())
    assert held(store, "a", "b", "c") == [False, True, True]


def test_a_large_state_evicts_as_many_as_needed() -> None:
    store = filled(3 * BYTES, "a", "b", "c")
    store.put(key("large"), state(6))
    assert held(store, "a", "b", "c", "large") == [False, False, True, True]


def test_the_newest_is_kept_whatever_the_budget() -> None:
    store = filled(0, "a", "b")
    assert held(store, "a", "b") == [False, True]
    store.put(key("large"), state(300))
    assert held(store, "b", "large") == [False, True]


def test_putting_a_key_again_replaces_its_state() -> None:
    store, newer = filled(2 * BYTES, "a", "b"), state()
    store.put(key("a"), newer)
    assert len(store) == 2 and store.get(key("a")) is newer
    store.put(key("c"), state())
    assert held(store, "b", "c") == [False, True]


def test_a_state_of_other_weights_is_never_returned() -> None:
    store = PromptStore(10 * BYTES)
    store.put(key("a", version=3), state())
    assert store.get(key("a", version=4)) is None
    assert store.get(key("a", version=3, adapters=False)) is None


def test_a_version_change_drops_stale_states_and_keeps_those_without_adapters() -> None:
    store = PromptStore(10 * BYTES)
    base, fresh = state(), state()
    store.put(key("a", version=3), state())
    store.put(key("a", version=0, adapters=False), base)
    store.put(key("b", version=4), fresh)
    store.drop_stale(4)
    assert store.get(key("a", version=3)) is None
    assert store.get(key("a", version=0, adapters=False)) is base
    assert store.get(key("b", version=4)) is fresh
    assert store.nbytes == 2 * BYTES


def test_clear_drops_everything() -> None:
    store = filled(10 * BYTES, "a", "b")
    store.clear()
    assert len(store) == 0 and store.nbytes == 0 and held(store, "a", "b") == [False, False]
