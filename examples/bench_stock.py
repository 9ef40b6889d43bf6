"""Ordinary full-sequence training beside ours on one device: time of a step, longest prompt.

    python examples/bench_stock.py step --shape qwen3.5-4b --context 16K --responses 64,128,1024
    python examples/bench_stock.py longest --shape qwen3-8b --responses 1024

Ordinary is the stock model of transformers with torch's attention, each layer recomputed in the
backward, and the logits of a chunk of tokens at a time; rows one after the other, each with its
prompt: a forward for old log-probs, forward and backward, then one step of AdamW. Ours is
``longstraw bench step``. Same random weights, dtype, head and optimizer; all parameters are
trained.

``longest`` doubles the prompt until memory runs out, then halves the distance to a sixteenth: of
ordinary training by running a row; of ours by replaying a response over a random state.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from longstraw_backend.bench.capture import capture
from longstraw_backend.bench.ceilings import Ceilings
from longstraw_backend.bench.folder import Progress
from longstraw_backend.bench.replay import one_response, random_state
from longstraw_backend.bench.runner import described
from longstraw_backend.bench.settings import Settings, rungs_of
from longstraw_backend.bench.shapes import config_of, random_model
from longstraw_backend.bench.step import step_phases
from longstraw_backend.bench.subject import Subject, make_subject
from longstraw_backend.bench.watched import timed
from longstraw_backend.choices import Gradient
from longstraw_backend.kernels.logprob_head import logprob_head
from longstraw_backend.models.sizes import ModelSizes

_NO_CEILINGS = Ceilings(1.0, 1.0, None, None, 1.0, None, None)
Found = dict[str, Any]


class Ordinary:
    """Full-sequence training of the stock model."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        config = config_of(settings.shape, settings.layers, settings.vocab)
        self.model = random_model(config, settings.device, str(settings.dtype)).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = _optimizer(self.model)

    def log_probs(self, row: Tensor) -> Tensor:
        """Of the last tokens, those of a response, in float32."""
        tokens = self.settings.response
        hidden = self.model.model(input_ids=row[None], use_cache=False).last_hidden_state
        weight, chunk = self.model.lm_head.weight, self.settings.head_chunk
        ours = hidden[0, -tokens - 1 : -1]
        return logprob_head(ours, weight, row[-tokens:], chunk_tokens=chunk).log_probs

    def score(self, rows: list[Tensor]) -> None:
        """Old log-probs."""
        with torch.no_grad():
            for row in rows:
                self.log_probs(row)

    def backward(self, rows: list[Tensor]) -> None:
        """Gradients of a mean over the group."""
        for row in rows:
            (-self.log_probs(row).mean() / len(rows)).backward()

    def step(self) -> None:
        """Clip and AdamW."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, context: int, count: int) -> list[Tensor]:
        """Random prompts with responses, [S + R] each."""
        generator = torch.Generator().manual_seed(0)
        size = count, context + self.settings.response
        ids = torch.randint(0, self.model.config.vocab_size, size, generator=generator)
        return list(ids.to(self.model.device))


def _optimizer(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-6, fused=True)


def _subject(settings: Settings) -> Subject:
    config = config_of(settings.shape, settings.layers, settings.vocab)
    return make_subject(settings, config, ModelSizes.of(config), _NO_CEILINGS)


def ordinary_step(settings: Settings, repeat: int) -> Found:
    """Median seconds of its phases, and the peak in bytes."""
    side = Ordinary(settings)
    rows = side.rows(settings.length, settings.group)
    work = {
        "score": lambda: side.score(rows),
        "replay": lambda: side.backward(rows),
        "optimizer": side.step,
    }
    runs = [
        {name: timed(part, side.model.device)[1:] for name, part in work.items()}
        for _ in range(1 + repeat)
    ][1:]
    peaks = [peak for run in runs for _, peak in run.values() if peak is not None]
    return _summed({name: statistics.median(run[name][0] for run in runs) for name in work}, peaks)


def our_step(settings: Settings, repeat: int) -> Found:
    """The same of ours."""
    subject = _subject(settings)
    prompt = subject.tokens(settings.length + 1)
    runs, peaks = [], []
    for _ in range(1 + repeat):
        progress = Progress(settings)
        segment = capture(subject, prompt[:-1], progress)
        assert segment is not None, "no time limit is set"
        phases = step_phases(subject, prompt, segment)
        captured = {"capture": sum(c.seconds for c in progress.chunks)}
        runs.append(captured | {p.name: p.seconds for p in phases})
        peaks += [p.peak_bytes for p in phases if p.peak_bytes is not None]
    names = runs[0]
    return _summed({n: statistics.median(run[n] for run in runs[1:]) for n in names}, peaks)


def _summed(seconds: dict[str, float], peaks: list[int]) -> Found:
    return {"seconds": seconds, "total": sum(seconds.values()), "peak_bytes": max(peaks, default=0)}


def steps(settings: Settings, responses: tuple[int, ...], repeat: int) -> list[Found]:
    """Both sides for each length of responses."""
    found = []
    for response in responses:
        here = replace(settings, response=response)
        sides = {"ordinary": ordinary_step(here, repeat)}
        for gradient in get_args(Gradient):
            _forget()
            sides[gradient] = our_step(replace(here, gradient=gradient), repeat)
        _forget()
        once = sides["ordinary"]["total"]
        faster = {g: once / sides[g]["total"] for g in get_args(Gradient)}
        print(f"responses of {response}: {once:.3f} s, " + _times(faster), flush=True)
        found.append({"response": response, "faster": faster} | sides)
    return found


def _times(faster: dict[str, float]) -> str:
    return ", ".join(f"{gradient} {times:.2f} times as fast" for gradient, times in faster.items())


def longest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The longest of multiples of ``least`` that fits, to a sixteenth of itself; 0 if none does."""
    if not fits(least):
        return 0
    below, above = least, 2 * least
    while above <= most and fits(above):
        below, above = above, 2 * above
    while above <= most and above - below > max(least, below // 16):
        middle = (below + above) // 2 // least * least
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


@contextmanager
def _running_out(found: list[bool]) -> Iterator[None]:
    try:
        yield
        found.append(True)
    except torch.OutOfMemoryError:
        found.append(False)
    _forget()


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ordinary_fits(settings: Settings) -> Callable[[int], bool]:
    """Whether a row of so many prompt tokens can be trained, optimizer state included."""
    side = Ordinary(settings)
    side.backward(side.rows(1, 1))
    side.step()

    def fits(context: int) -> bool:
        found: list[bool] = []
        with _running_out(found):
            side.backward(side.rows(context, 1))
        side.model.zero_grad()
        print(f"ordinary, {context:,}: {found[0]}", flush=True)
        return found[0]

    return fits


def ours_fits(settings: Settings) -> Callable[[int], bool]:
    """Whether a response can be replayed over so many tokens' state, optimizer state included."""
    subject = _subject(settings)
    few, optimizer = random_state(subject, settings.chunk), _optimizer(subject.model.module)
    one_response(subject, few, subject.response(0))()
    optimizer.step()

    def fits(context: int) -> bool:
        found: list[bool] = []
        with _running_out(found):
            one_response(subject, random_state(subject, context), subject.response(0))()
        print(f"{settings.gradient}, {context:,}: {found[0]}", flush=True)
        return found[0]

    return fits


def longest_of_each(settings: Settings, most: int) -> Found:
    """By side, in tokens."""
    found = {"ordinary": longest(ordinary_fits(settings), settings.chunk, most)}
    for gradient in get_args(Gradient):
        _forget()
        fits = ours_fits(replace(settings, gradient=gradient))
        found[gradient] = longest(fits, settings.chunk, most)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["step", "longest"])
    parser.add_argument("--shape", default="qwen3.5-4b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=rungs_of, default=(16384,), help="prompt tokens")
    parser.add_argument("--responses", type=rungs_of, default=(64, 128, 1024))
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--page-tokens", type=int, default=Settings.page_tokens)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--most", type=rungs_of, default=(1 << 22,), help="longest: prompt tokens")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run and print; write the numbers if wanted."""
    args = _arguments()
    settings = Settings(
        "step",
        args.shape,
        layers=args.layers,
        context=args.context,
        response=args.responses[0],
        group=args.group,
        chunk=args.chunk,
        page_tokens=args.page_tokens,
        device=args.device,
        profile=False,
    )
    if args.what == "step":
        found: Any = {"steps": steps(settings, args.responses, args.repeat)}
    else:
        found = {"longest_prompt": longest_of_each(settings, args.most[0])}
        print(found["longest_prompt"])
    if args.json is not None:
        args.json.write_text(json.dumps(described(settings) | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
