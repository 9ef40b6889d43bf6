"""Time responses over a state, one after the other: score, forward under autograd, backward."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from longstraw_backend.models.block_traffic import backward_bytes, forward_bytes
from longstraw_backend.state import Segment
from longstraw_backend.walk import Block, advance, predict

from .flops import replay_flops
from .phase import Phase
from .subject import Subject
from .watched import timed, transient_peak

__all__ = ["one_response", "random_state", "replay_phases"]


def random_state(subject: Subject, tokens: int) -> Segment:
    """Random values in the form of a captured state, which a short capture shows."""
    model, settings = subject.model, subject.settings
    few = subject.room(1)
    with torch.no_grad():
        advance(model, subject.tokens(1)[None], few)
    like = [layer.visible(1)[-1] for layer in few.layers]
    segment = subject.room(tokens)
    while segment.length < tokens:
        count = min(settings.chunk, tokens - segment.length)
        for layer, pieces in zip(segment.layers, like, strict=True):
            here = [x.to(model.device) for x in pieces if x is not None]
            grown = layer.kind != "recurrent"
            layer.write(segment.length, *(_random(x, count if grown else None) for x in here))
        segment.commit(count)
    return segment


def _random(x: torch.Tensor, tokens: int | None) -> torch.Tensor:
    shape = x.shape if tokens is None else (*x.shape[:2], tokens, x.shape[3])
    return torch.randn(shape, dtype=x.dtype, device=x.device)


def replay_phases(subject: Subject, segment: Segment, group: int) -> list[Phase]:
    """Medians over the responses of a group, each replayed after it was scored; ``replay`` is all
    of them: its seconds are those of the group, its peak the highest.

    A first response, replayed before, warms up and leaves the gradients that others add to.
    """
    one_response(subject, segment, subject.response(0))()
    found = [_response(subject, segment, subject.response(i)) for i in range(group)]
    phases = [_median(list(same)) for same in zip(*found, strict=True)]
    phases = [_with_peak(subject, segment, phase) for phase in phases]
    return [*phases, _together(found, phases)]


def one_response(subject: Subject, segment: Segment, block: Block) -> Callable[[], None]:
    """Forward and backward of a response; gradients are added to those there are."""

    def work() -> None:
        _backward(_forward(subject, segment, block))

    return work


def _score(subject: Subject, segment: Segment, block: Block) -> Callable[[], None]:
    def work() -> None:
        with torch.no_grad():
            predict(subject.model, block, segment)

    return work


def _forward(subject: Subject, segment: Segment, block: Block) -> Any:
    checkpointing = subject.settings.checkpointing
    return predict(subject.model, block, segment, grad=True, checkpointing=checkpointing)


def _backward(out: Any) -> None:
    out.log_probs.mean().backward()


def _response(subject: Subject, segment: Segment, block: Block) -> list[Phase]:
    device, sent = subject.model.device, [subject.sent]

    def passed(work: Callable[[], Any]) -> tuple[Any, float, int | None]:
        found = timed(work, device)
        sent.append(subject.sent)
        return found

    _, scored, score_peak = passed(_score(subject, segment, block))
    out, ahead, ahead_peak = passed(lambda: _forward(subject, segment, block))
    _, back, back_peak = passed(lambda: _backward(out))
    context, tokens = segment.length, subject.settings.response
    forward, again, backward = replay_flops(
        subject.text_config, subject.sizes, context, tokens, subject.training
    )
    once = subject.roofline(forward)
    twice = subject.roofline(again) + subject.roofline(backward, backward=True)
    phases = [
        Phase("score", context, tokens, scored, forward, once, None, score_peak),
        Phase("forward", context, tokens, ahead, forward, once, None, ahead_peak),
        Phase("backward", context, tokens, back, again + backward, twice, None, back_peak),
    ]
    counted = [after - before for before, after in pairwise(sent)]
    return [_with_sent(subject, p, count) for p, count in zip(phases, counted, strict=True)]


def _with_sent(subject: Subject, phase: Phase, counted: int) -> Phase:
    """What ranks sent each other in it, and what they should have by formula."""
    config, split = subject.text_config, subject.split
    if split is None:
        return phase
    block = range(phase.context, phase.context + phase.tokens)
    formula = forward_bytes(config, block, split)
    if phase.name == "backward":
        again = forward_bytes(config, block, split, again=True)
        formula = backward_bytes(config, block, split)
        formula.update(again if subject.settings.checkpointing else {})
    return replace(phase, sent_bytes=(counted, sum(formula.values())))


def _median(same: list[Phase]) -> Phase:
    peaks = [p.peak_bytes for p in same if p.peak_bytes is not None]
    seconds = statistics.median(p.seconds for p in same)
    return replace(same[0], seconds=seconds, peak_bytes=max(peaks, default=None))


def _with_peak(subject: Subject, segment: Segment, phase: Phase) -> Phase:
    """Predicted bytes, and measured ones where no allocator tells: on a CPU of a whole response."""
    if phase.name == "forward" or subject.settings.cp > 1:
        return phase
    scored, plan = phase.name == "score", subject.plan(segment.length)
    # gradients of responses before are there
    trained = plan.gradients + plan.cotangents
    predicted = plan.peak("score") + trained if scored else plan.peak("replay")
    if phase.peak_bytes is not None:
        return replace(phase, predicted_bytes=predicted)
    work = (_score if scored else one_response)(subject, segment, subject.response(0))
    above = transient_peak(work, subject.model.device)
    peak = None if above is None else above + subject.held_bytes(segment)
    return replace(phase, predicted_bytes=predicted, peak_bytes=peak)


def _together(found: list[list[Phase]], phases: list[Phase]) -> Phase:
    every = [phase for response in found for phase in response]
    peaks = [p.peak_bytes for p in phases if p.peak_bytes is not None]
    return Phase(
        "replay",
        phases[0].context,
        phases[0].tokens * len(found),
        sum(p.seconds for p in every),
        sum((p.flops for p in every), start=type(phases[0].flops)()),
        sum(p.roofline_seconds for p in every),
        phases[-1].predicted_bytes,
        max(peaks, default=None),
    )
