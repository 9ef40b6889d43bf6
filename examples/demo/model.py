"""The demo's tokenizer and model: a tiny model that can find notes and mostly says "unknown".

Nothing is downloaded. The weights are warmed up by ordinary supervised training, in these parts:

    copy      random tokens, then the same in chunks of another order: the model learns to look a
              token up and to go on with what followed it
    find      questions of the demo's kind in longer and longer documents
    abstain   a few steps in which most answers are "unknown"
    select    where there is an indexer: to score high what was attended to so far (`indexer.py`)

So the model can read a long document, but tries only now and then, which keeps its reward low. That
trying pays is left to DAPO.

The model is driven as in the run that follows: a whole document is one block over an empty state,
and its gradient that of ordinary training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import task
import torch
from curriculum import IGNORE, SPECIAL, Conversations, copy_batch
from families import FAMILIES, Family
from indexer import train_indexer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from longstraw_backend.models import DrivenModel, drive
from longstraw_backend.walk.advance import advance

VOCABULARY = 1024
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The loss at which copying is learnt well enough.
COPIED = 1.0
# The share below which there is no reward to learn from: dynamic sampling would draw for ever.
FOUND_AT_LEAST = 0.3
# The number of the last warm-up steps, whose answers are mostly "unknown".
ABSTAIN_STEPS = 25


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the documentation; every name and code word becomes one token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " " + " ".join((*task.NAMES, *task.CODE_WORDS, task.ABSTAIN))
    frequent = [words, task.note("x", []), task.question("x")] * 1000
    inner.train_from_iterator(["\n".join(task.documentation()), *frequent], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def token_options(vocabulary: int) -> dict[str, Any]:
    """Return what a configuration says of the tokenizer."""
    return dict(
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
    )


def new_model(config: PretrainedConfig) -> DrivenModel:
    """Return a model with random weights, driven."""
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        # Latent attention has no norm after this: scores begin near 0, and looking up comes late.
        if name.endswith("q_b_proj.weight"):
            parameter.data *= 12
    return drive(model)


def with_weights(config: PretrainedConfig, warm: nn.Module) -> PreTrainedModel:
    """Return a model of this configuration with the weights of another that lacks an indexer."""
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(warm.state_dict(), strict=False)
    assert not unexpected and all(".indexer." in name for name in missing), (missing, unexpected)
    return model


def logits_at(model: DrivenModel, tokens_BT: Tensor, chosen_BT: Tensor, grad: bool) -> Tensor:
    """Return the logits [chosen, V] of the tokens that follow the chosen ones."""

    def head(hidden_BTD: Tensor, _: Tensor, linear: Callable[..., Tensor]) -> tuple[Tensor]:
        return (linear(hidden_BTD[chosen_BT]),)

    empty = model.segment(0, 1)
    (logits,) = advance(model, tokens_BT, empty, grad=grad, commit=False, head=head)
    return logits


def train_step(
    model: DrivenModel, optimizer: torch.optim.Optimizer, tokens_BT: Tensor, labels_BT: Tensor
) -> float:
    """Take one step on next-token cross entropy where a label is set; return the loss."""
    wanted_BT = torch.full_like(labels_BT, IGNORE)
    wanted_BT[:, :-1] = labels_BT[:, 1:]
    chosen_BT = wanted_BT != IGNORE
    logits = logits_at(model, tokens_BT, chosen_BT, grad=True)
    loss = cross_entropy(logits, wanted_BT[chosen_BT])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def new_optimizer(model: DrivenModel, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW for all parameters."""
    return torch.optim.AdamW(
        model.module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def learn_to_copy(
    model: DrivenModel, vocabulary: int, learning_rate: float, max_steps: int = 700
) -> None:
    """Train on copying until the loss is small."""
    optimizer = new_optimizer(model, learning_rate)
    for step in range(1, max_steps + 1):
        set_rate(optimizer, learning_rate * min(1.0, step / 30))
        if train_step(model, optimizer, *copy_batch(vocabulary)) < COPIED:
            return


def retrieval(
    model: DrivenModel, tokenizer: PreTrainedTokenizerFast, items: list[task.Example]
) -> float:
    """Return how much of the note a sampled answer gets right once it has begun with the name."""
    total = 0.0
    for item in items:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}],
            add_generation_prompt=True,
            return_dict=False,
        )
        answer = tokenizer.encode(" " + item.answer)
        tokens_BT = torch.tensor([prompt + answer])
        before_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        before_BT[0, -len(answer) - 1 : -1] = True
        logits_TV = logits_at(model, tokens_BT, before_BT, grad=False)
        log_probs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        total += log_probs_T[1:].cumsum(0).exp().mean().item()
    return total / len(items)


def learn_to_find(
    model: DrivenModel,
    conversations: Conversations,
    items: list[task.Example],
    learning_rate: float,
    enough: float,
    max_steps: int = 160,
) -> None:
    """Train on longer and longer documents until this share of a note is found in full length."""
    optimizer = new_optimizer(model, learning_rate)
    full_length = False
    for step in range(1, max_steps + 1):
        set_rate(optimizer, learning_rate * (0.5 if full_length else min(1.0, step / 20)))
        conversations.learnt(train_step(model, optimizer, *conversations.batch(confidence=1.0)))
        full_length = conversations.budget >= conversations.longest
        if full_length and step % 10 == 0:
            if retrieval(model, conversations.tokenizer, items) >= enough:
                return


def learn_to_abstain(
    model: DrivenModel, conversations: Conversations, learning_rate: float, confidence: float
) -> None:
    """Train on answers most of which are "unknown"."""
    optimizer = new_optimizer(model, learning_rate)
    for _ in range(ABSTAIN_STEPS):
        train_step(model, optimizer, *conversations.batch(confidence))


def warmed_up(
    family: Family, tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[PreTrainedModel, float]:
    """Return the model and what share of a note it finds when it tries."""
    torch.manual_seed(seed)
    options = token_options(len(tokenizer))
    conversations = Conversations(tokenizer, min(1600, family.prompt_tokens), seed)
    items = task.examples(tokenizer.encode, 20, min_tokens=family.prompt_tokens, seed=seed + 1000)
    warm = new_model((family.warm_up or family.config)(**options))
    learn_to_copy(warm, len(tokenizer), family.learning_rate)
    learn_to_find(warm, conversations, items, family.learning_rate, family.enough)
    learn_to_abstain(warm, conversations, family.learning_rate / 4, family.confidence)
    model = with_weights(family.config(**options), warm.module)
    if family.warm_up is not None:
        train_indexer(model, warm.module, lambda: conversations.batch(1.0, rows=2))
    found = retrieval(drive(with_weights(model.config, model)), tokenizer, items)
    return model, found


def prepare(folder: Path, family: str, seed: int = 0) -> PreTrainedTokenizerFast:
    """Make tokenizer and warmed-up model in `folder` unless there; return the tokenizer."""
    done = folder / "ready"
    if done.exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    start = time.perf_counter()
    print(f"training the tokenizer and warming up a {family}, a minute or two", flush=True)
    tokenizer = train_tokenizer()
    model, found = warmed_up(FAMILIES[family], tokenizer, seed)
    if found < FOUND_AT_LEAST:
        raise SystemExit(f"the warmed-up {family} finds {found:.0%} of a note: too few to go on")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seconds = time.perf_counter() - start
    done.write_text(f"found {found:.3f}, {seconds:.0f} s\n")
    print(f"  finds {found:.0%} of a note when it tries, {seconds:.0f} s", flush=True)
    return tokenizer
