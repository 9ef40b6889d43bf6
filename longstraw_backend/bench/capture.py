"""Time a capture, chunk by chunk; a shorter prompt's capture is the beginning of a longer one's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from longstraw_backend.state import Segment
from longstraw_backend.walk import advance
from longstraw_backend.walk.update_traffic import captured_bytes

from .flops import capture_flops
from .folder import Chunk, Progress
from .phase import Phase
from .subject import Subject
from .together import speaks
from .watched import timed, transient_peak

__all__ = ["capture", "capture_phase", "chunk_phase", "last_chunk"]


def capture(
    subject: Subject,
    prompt: Tensor,
    progress: Progress,
    at_rung: Callable[[Segment], None] = lambda _: None,
) -> Segment | None:
    """Capture all tokens of ``prompt``; None, with the state saved, if time ran out.

    Args:
        prompt: token ids, [S] int64 on the device.
        at_rung: called with the state when it has come to a length of ``settings.context``.
    """
    settings, model = subject.settings, subject.model
    segment = subject.room(prompt.numel())
    progress.restore(segment, model.device)
    began = time.monotonic()
    with tqdm(
        total=prompt.numel(),
        initial=segment.length,
        unit="tok",
        unit_scale=True,
        desc="capture",
        disable=not speaks(),
    ) as bar:
        for tokens in prompt[segment.length :].split(settings.chunk):
            if settings.seconds is not None and time.monotonic() - began >= settings.seconds:
                progress.save(segment)
                progress.write()
                return None
            progress.add(_captured(subject, tokens, segment), segment)
            bar.update(tokens.numel())
            if segment.length in settings.context:
                at_rung(segment)
                progress.write()
    return segment


def _captured(subject: Subject, tokens: Tensor, segment: Segment) -> Chunk:
    model = subject.model

    def work() -> None:
        with torch.no_grad():
            advance(model, tokens[None], segment)

    before = subject.sent
    _, seconds, peak = timed(work, model.device)
    return Chunk(segment.length, seconds, peak, subject.sent - before)


def last_chunk(subject: Subject, segment: Segment) -> Callable[[], object]:
    """A chunk after all that is captured, which leaves the state as it is."""
    tokens = subject.tokens(subject.settings.chunk)

    def work() -> object:
        with torch.no_grad():
            return advance(subject.model, tokens[None], segment, commit=False)

    return work


def chunk_phase(subject: Subject, segment: Segment) -> Phase:
    """Of one chunk after all there is, the median of three: how fast a capture is that far on."""
    work, device = last_chunk(subject, segment), subject.model.device
    work()
    runs = [timed(work, device) for _ in range(3)]
    start, count = segment.length, subject.settings.chunk
    config, sizes = subject.text_config, subject.sizes
    flops = capture_flops(config, sizes, start, start + count, lora=subject.settings.lora)
    peaks = [peak for _, _, peak in runs if peak is not None]
    return Phase(
        "chunk",
        start,
        count,
        statistics.median(seconds for _, seconds, _ in runs),
        flops,
        subject.roofline(flops),
        subject.predicted(start, "capture"),
        max(peaks, default=None),
    )


def capture_phase(subject: Subject, progress: Progress, segment: Segment) -> Phase:
    """Of the capture up to where the segment is now."""
    length, model = segment.length, subject.model
    chunks = [c for c in progress.chunks if c.stop <= length]
    peaks = [c.peak_bytes for c in chunks if c.peak_bytes is not None]
    peak = max(peaks, default=None)
    if peak is None:
        above = transient_peak(last_chunk(subject, segment), model.device)
        peak = None if above is None else above + subject.held_bytes(segment)
    flops = capture_flops(subject.text_config, subject.sizes, 0, length, lora=subject.settings.lora)
    return Phase(
        "capture",
        length,
        length,
        sum(c.seconds for c in chunks),
        flops,
        subject.roofline(flops),
        subject.predicted(length, "capture"),
        peak,
        _sent(subject, chunks),
    )


def _sent(subject: Subject, chunks: list[Chunk]) -> tuple[int, int] | None:
    """Counted, and by formula."""
    if subject.split is None:
        return None
    length, chunk = chunks[-1].stop, subject.settings.chunk
    formula = captured_bytes(subject.text_config, length, chunk, subject.split)
    return sum(c.sent_bytes for c in chunks), sum(formula.values())
