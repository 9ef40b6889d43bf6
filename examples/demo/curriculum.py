"""What the warm-up trains on: chunks to copy, then conversations about documents with notes."""

from __future__ import annotations

import random

import task
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# verl looks for <|im_end|> in a tokenizer for Qwen models, for <|observation|> in one for GLM.
SPECIAL = ["<|pad|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
IGNORE = -100
CHUNK = 4
# The loss up to which documents grow: longer ones before the last are read teach nothing.
GROW_BELOW = 0.6
GROWTH = 1.06


def copy_batch(vocabulary: int, rows: int = 64, chunks: int = 4) -> tuple[Tensor, Tensor]:
    """Return random tokens, then their chunks in another order; labels inside the second chunks."""
    first = torch.rand(rows, vocabulary).argsort(-1)[:, : chunks * CHUNK].view(rows, chunks, CHUNK)
    order = torch.rand(rows, chunks).argsort(-1)[:, :, None].expand(-1, -1, CHUNK)
    second = first.gather(1, order)
    labels = second.clone()
    labels[:, :, 0] = IGNORE
    tokens_BT = torch.cat([first.flatten(1), second.flatten(1)], dim=1)
    return tokens_BT, torch.cat([torch.full_like(first, IGNORE).flatten(1), labels.flatten(1)], 1)


def conversation(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    docs: list[list[int]],
    budget: int,
    confidence: float,
) -> tuple[list[int], list[int]]:
    """Return tokens and labels of one document, then a question and answer for each note.

    With probability 1 - `confidence` the answer is that nobody knows.
    """
    _, end, _, user, assistant, _ = range(len(SPECIAL))
    newline = tokenizer.encode("\n")
    codes = task.draw_codes(rng, task.NUM_NOTES)
    lines, size, at = [], 0, rng.randrange(len(docs))
    while size < budget:
        lines.append(docs[at % len(docs)])
        size, at = size + len(lines[-1]), at + 1
    for name, code in codes.items():
        lines.insert(rng.randint(0, len(lines)), tokenizer.encode(task.note(name, code)))
    tokens = [user, *(token for line in lines for token in [*line, *newline])]
    labels = [IGNORE] * len(tokens)
    for turn, name in enumerate(rng.sample(list(codes), len(codes))):
        asked = [user] * (turn > 0) + [*tokenizer.encode(task.question(name)), end, assistant]
        text = task.answer(name, codes[name]) if rng.random() < confidence else task.ABSTAIN
        answer = [*tokenizer.encode(" " + text), end]
        tokens += asked + answer
        labels += [IGNORE] * len(asked) + answer
    return tokens, labels


class Conversations:
    """Batches of about 5,000 tokens whose documents grow from 40 tokens to `longest`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, longest: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.docs = [tokenizer.encode(line) for line in task.documentation()]
        self.longest = longest
        self.budget = 40.0

    def batch(self, confidence: float, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens and labels, [rows, width] each, padded on the right."""
        rows = rows or max(2, 5000 // (int(self.budget) + 130))
        pairs = [
            conversation(self.rng, self.tokenizer, self.docs, int(self.budget), confidence)
            for _ in range(rows)
        ]
        width = max(len(tokens) for tokens, _ in pairs)
        return (
            torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in pairs]),
            torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in pairs]),
        )

    def learnt(self, loss: float) -> None:
        """Lengthen the documents where the last batch's loss was small."""
        if loss <= GROW_BELOW:
            self.budget = min(float(self.longest), self.budget * GROWTH)
