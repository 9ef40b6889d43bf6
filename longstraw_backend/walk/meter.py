"""What a step did: seconds per phase, tokens, bytes. Numbers for the host's tracker."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from longstraw_backend.models import DrivenModel

__all__ = ["Meter", "wait_for"]


@dataclass
class Meter:
    """Counters of one call; :meth:`metrics` names them.

    Attributes:
        seconds: wall time per phase (capture, score, replay, prompt_backward) with device work.
        sent: bytes that left this rank in a phase for others that share the prompt, by purpose;
            ``parallel/traffic.py`` says what is counted.
        prompt_tokens_captured: prompt tokens that were run.
        full_sequence_tokens: prompt and response tokens an ordinary trainer would have run.
        response_tokens: response tokens scored or replayed.
        state_bytes: resident prompt state at its peak, on the device and in CPU memory.
        graph_tokens_peak: most tokens in one autograd graph, what fills up its rows included.
        forward_tokens: the same of all passes after the capture, with a graph or without.
        backward_tokens: tokens whose graph had a backward.
        branch_bytes: state and cotangents of a response that is walked in reverse, at their peak.
        cotangent_bytes: cotangents of a prompt's state, at their peak.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    prompt_tokens_captured: int = 0
    full_sequence_tokens: int = 0
    response_tokens: int = 0
    state_bytes: int = 0
    graph_tokens_peak: int = 0
    forward_tokens: int = 0
    backward_tokens: int = 0
    branch_bytes: int = 0
    cotangent_bytes: int = 0

    def reset(self) -> None:
        """Begin again."""
        self.__dict__.update(Meter().__dict__)

    @contextmanager
    def phase(self, name: str, model: DrivenModel) -> Iterator[None]:
        """Time a phase and count what it sends; on CUDA waits for the device, twice per capture or
        replay."""
        device, traffic = model.device, model.ranks.traffic
        before = traffic.sent.copy()
        wait_for(device)
        began = time.perf_counter()
        try:
            yield
        finally:
            wait_for(device)
            self.seconds[name] += time.perf_counter() - began
            self.sent[name] += traffic.since(before)

    def metrics(self) -> dict[str, float]:
        """Flat numbers under ``longstraw/``."""
        named = {f"longstraw/{phase}_seconds": spent for phase, spent in self.seconds.items()}
        sent = {
            f"longstraw/{phase}_bytes_sent": float(self.sent[phase].total())
            for phase in self.seconds
        }
        return (
            named
            | sent
            | {
                "longstraw/prompt_tokens_captured": float(self.prompt_tokens_captured),
                "longstraw/prompt_tokens_full_sequence": float(
                    self.full_sequence_tokens - self.response_tokens
                ),
                "longstraw/response_tokens": float(self.response_tokens),
                "longstraw/resident_state_bytes": float(self.state_bytes),
                "longstraw/graph_tokens_peak": float(self.graph_tokens_peak),
                "longstraw/forward_tokens": float(self.forward_tokens),
                "longstraw/backward_tokens": float(self.backward_tokens),
                "longstraw/cotangent_bytes": float(self.cotangent_bytes),
            }
        )


def wait_for(device: torch.device) -> None:
    """Until the device has done what was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
