"""The demo's task: find one note in a long document.

A prompt is a stretch of Python's own documentation (`pydoc_data.topics`, which every Python ships),
at least `min_tokens` tokens long, with a few notes planted at random places:

    Note: harbor tango maple echo violin.

The question at the end asks for the note on one of the names; the other notes are decoys. The
answer is the name and its four words, so a response is six tokens beside a prompt of thousands: the
shape LongStraw is for.
Every draw comes from a seed. The text itself differs a little between Python versions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "harbor castle garden bridge forest island temple market tunnel museum station "
    "library valley canyon village airport"
).split()
CODE_WORDS = (
    "apple bravo candle dragon echo falcon guitar hammer igloo jacket kettle lemon maple needle "
    "olive pepper quartz rocket saddle tango umbrella violin walnut yellow zebra anchor basket "
    "copper dolphin engine feather glacier helmet insect jungle koala ladder magnet nickel orange"
).split()
CODE_LENGTH = 4
ABSTAIN = "unknown"
NUM_NOTES = 4
DATA_SOURCE = "longstraw/find_the_note"

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Example:
    """One question: the user's message and the only right answer."""

    prompt: str
    answer: str


def documentation() -> list[str]:
    """Return the lines of Python's language reference, in a fixed order, without blank ones."""
    from pydoc_data.topics import topics

    lines = (line.strip() for name in sorted(topics) for line in topics[name].splitlines())
    return [line for line in lines if line]


def note(name: str, code: Sequence[str]) -> str:
    """Return the planted line about a name."""
    return f"Note: {name} {' '.join(code)}."


def question(name: str) -> str:
    """Return the line that asks for the note on a name."""
    return f"What is the note on {name}?"


def answer(name: str, code: Sequence[str]) -> str:
    """Return the right response to the question: the note, without its punctuation."""
    return f"{name} {' '.join(code)}"


def draw_codes(rng: random.Random, num_notes: int) -> dict[str, list[str]]:
    """Draw `num_notes` names with one code each; no code word occurs twice."""
    words = rng.sample(CODE_WORDS, num_notes * CODE_LENGTH)
    names = rng.sample(NAMES, num_notes)
    return {name: words[i * CODE_LENGTH : (i + 1) * CODE_LENGTH] for i, name in enumerate(names)}


def plant(rng: random.Random, lines: list[str], codes: dict[str, list[str]]) -> str:
    """Return the lines as one text, with a note for each code at a random place."""
    lines = list(lines)
    for name, code in codes.items():
        lines.insert(rng.randint(0, len(lines)), note(name, code))
    return "\n".join(lines)


def long_example(
    rng: random.Random, docs: list[str], sizes: list[int], min_tokens: int, num_notes: int
) -> Example:
    """Return a question about `min_tokens` tokens or a few more; `sizes` has tokens per line."""
    start, total, stop = rng.randrange(len(docs)), 0, 0
    while total < min_tokens:
        total += sizes[(start + stop) % len(docs)]
        stop += 1
    lines = [docs[(start + i) % len(docs)] for i in range(stop)]
    codes = draw_codes(rng, num_notes)
    name = rng.choice(list(codes))
    text = plant(rng, lines, codes)
    return Example(prompt=f"{text}\n{question(name)}", answer=answer(name, codes[name]))


def examples(
    tokenize: Tokenize,
    count: int,
    *,
    min_tokens: int = 2000,
    num_notes: int = NUM_NOTES,
    seed: int = 0,
) -> list[Example]:
    """Return `count` different long questions."""
    rng = random.Random(seed)
    docs = documentation()
    sizes = [len(tokenize(line)) for line in docs]
    return [long_example(rng, docs, sizes, min_tokens, num_notes) for _ in range(count)]


def write_parquet(items: list[Example], path: Path) -> None:
    """Write the questions with the columns that verl's RLHFDataset reads."""
    import pandas as pd

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": item.prompt}],
            "ability": "retrieval",
            "reward_model": {"style": "rule", "ground_truth": item.answer},
            "extra_info": {"index": index},
        }
        for index, item in enumerate(items)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
