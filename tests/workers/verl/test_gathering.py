"""Gathering requests over a clock that the test turns."""

from longstraw_backend.workers.verl.gathering import Gathering


def test_complete_group_goes_at_once():
    waiting = Gathering(full=2, window=1.0)
    waiting.add("p", 1, now=0.0)
    assert waiting.take(now=0.0) is None
    waiting.add("p", 2, now=0.1)
    assert waiting.wait(now=0.1) == 0.0
    assert waiting.take(now=0.1) == [1, 2]
    assert waiting.wait(now=0.1) is None


def test_incomplete_group_goes_when_nothing_joined_for_the_window():
    waiting = Gathering(full=3, window=1.0)
    waiting.add("p", 1, now=0.0)
    waiting.add("p", 2, now=0.8)
    assert waiting.take(now=1.5) is None
    assert abs(waiting.wait(now=1.5) - 0.3) < 1e-9
    assert waiting.take(now=1.8) == [1, 2]


def test_complete_group_overtakes_an_older_incomplete_one():
    waiting = Gathering(full=2, window=1.0)
    waiting.add("old", 1, now=0.0)
    waiting.add("new", 2, now=0.1)
    waiting.add("new", 3, now=0.1)
    assert waiting.take(now=0.1) == [2, 3]
    assert len(waiting) == 1


def test_more_members_than_a_group_are_taken_in_turns():
    waiting = Gathering(full=2, window=1.0)
    for member in range(5):
        waiting.add("p", member, now=0.0)
    assert [waiting.take(now=0.0), waiting.take(now=0.0)] == [[0, 1], [2, 3]]
    assert waiting.take(now=0.0) is None
    assert waiting.take(now=1.0) == [4]
    assert len(waiting) == 0


def test_prompts_are_never_mixed():
    waiting = Gathering(full=2, window=0.0)
    waiting.add("a", 1, now=0.0)
    waiting.add("b", 2, now=0.0)
    assert waiting.take(now=0.0) == [1]
    assert waiting.take(now=0.0) == [2]
