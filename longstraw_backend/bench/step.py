"""Time a whole step: capture, score and replay of a group by the engine's own loop, optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw_backend.groups import Group, Row, group_rows
from longstraw_backend.kernels.logprob_head import LogProbs
from longstraw_backend.parallel import Lockstep
from longstraw_backend.parallel.finalize import clip_gradients
from longstraw_backend.state import PromptKey, PromptStore, Segment
from longstraw_backend.walk import BatchRun, GroupWalk, Meter, advance
from longstraw_backend.walk.advance import spans

from .flops import Flops, replay_flops, reverse_flops
from .phase import Phase
from .replay import one_response
from .subject import Subject
from .watched import timed

__all__ = ["step_phases"]

_KEY = PromptKey(b"bench", 0)


def step_phases(subject: Subject, prompt: Tensor, segment: Segment) -> list[Phase]:
    """Of the rest of a step whose prompt is captured: score and replay of all responses, with
    ``exact`` the walk back over the prompt, clipping and AdamW.

    Args:
        prompt: token ids, [S + 1], of which S are captured.
        segment: their state.
    """
    device = subject.model.device
    parameters = [p for p in subject.model.module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    _warm_up(subject, prompt)
    store = PromptStore(0)
    store.put(_KEY, segment)
    walk, meter = GroupWalk(subject.model, subject.settings.config, store), Meter()
    groups = _group(subject, prompt)

    def update() -> None:
        clip_gradients(parameters, 1.0)
        optimizer.step()

    passes = [
        lambda: _run(walk, groups, meter, grad=False),
        lambda: _run(walk, groups, meter, grad=True),
        update,
    ]
    measured = [timed(work, device)[1:] for work in passes]
    optimizer.zero_grad(set_to_none=True)
    return _phases(subject, segment.length, meter, measured)


def _warm_up(subject: Subject, prompt: Tensor) -> None:
    few = prompt[: min(subject.settings.chunk, prompt.numel() - 1)]
    with torch.no_grad():
        scratch = subject.room(few.numel())
        advance(subject.model, few[None], scratch)
    one_response(subject, scratch, subject.response(0))()
    subject.model.module.zero_grad(set_to_none=True)


def _group(subject: Subject, prompt: Tensor) -> list[Group]:
    rows = range(subject.settings.group)
    responses = [subject.tokens(subject.settings.response, seed=1 + i).cpu() for i in rows]
    return group_rows([prompt.cpu()] * len(rows), responses)


def _run(walk: GroupWalk, groups: list[Group], meter: Meter, *, grad: bool) -> None:
    def on_row(row: Row, out: LogProbs) -> None:
        if grad:
            (-out.log_probs.mean() / len(groups[0].rows)).backward()

    BatchRun(
        walk,
        meter,
        Lockstep(dist.group.WORLD if dist.is_initialized() else None),
        key=lambda _: _KEY,
        temperature=lambda _: 1.0,
        on_row=on_row,
        grad=grad,
    ).run(groups)


def _phases(
    subject: Subject, context: int, meter: Meter, measured: list[tuple[float, int | None]]
) -> list[Phase]:
    settings, config, sizes = subject.settings, subject.text_config, subject.sizes
    tokens, how = settings.group * settings.response, subject.training
    forward, again, backward = replay_flops(config, sizes, context, settings.response, how)
    scores = [(forward, Flops())] * settings.group
    replays = [(forward + again, backward)] * settings.group
    reverses = [
        (forward + again, backward)
        for forward, again, backward in (
            reverse_flops(config, sizes, part.start, part.stop - part.start, how)
            for part in spans(context, settings.chunk)
        )
    ]
    work = {"score": (tokens, scores), "replay": (tokens, replays)}
    if settings.gradient == "exact":
        work["prompt_backward"] = context, reverses
    peaks = {"score": measured[0][1], "replay": measured[1][1]}
    found = [
        _phase(subject, context, name, count, passes, meter.seconds[name], peaks.get(name))
        for name, (count, passes) in work.items()
    ]
    seconds, peak = measured[2]
    most = subject.predicted(context, "step")
    return [*found, Phase("optimizer", context, 0, seconds, Flops(), 0.0, most, peak)]


def _phase(
    subject: Subject,
    context: int,
    name: str,
    tokens: int,
    passes: list[tuple[Flops, Flops]],
    seconds: float,
    peak: int | None,
) -> Phase:
    """Of all passes of a kind, from what each does forward and backward. The walk back over a
    prompt lies in the replay's measured peak."""
    forward = sum((f for f, _ in passes), start=Flops())
    backward = sum((b for _, b in passes), start=Flops())
    best = subject.roofline(forward) + subject.roofline(backward, backward=True)
    walks_back = subject.settings.gradient == "exact" and name != "score"
    predicted = subject.predicted(context, "step" if walks_back else name)
    return Phase(name, context, tokens, seconds, forward + backward, best, predicted, peak)
