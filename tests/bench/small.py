"""A small run, and its subject without ceilings."""

from __future__ import annotations

from typing import Any

from longstraw_backend.bench.ceilings import Ceilings
from longstraw_backend.bench.settings import Settings
from longstraw_backend.bench.shapes import config_of
from longstraw_backend.bench.subject import Subject, make_subject
from longstraw_backend.models.sizes import ModelSizes

CEILINGS = Ceilings(1.0, 1.0, 1.0, 1.0, 1.0, None, None)


def small_settings(verb: Any = "capture", family: str = "qwen3", **options: Any) -> Settings:
    """A tiny model over 256 tokens."""
    defaults: dict[str, Any] = dict(context=(256,), chunk=64, page_tokens=100, response=32)
    defaults |= dict(shape=f"tiny-{family}", head_chunk=16, profile=False)
    return Settings(verb, **(defaults | options))


def subject_of(settings: Settings) -> Subject:
    """The model of a run."""
    config = config_of(settings.shape, settings.layers, settings.vocab)
    return make_subject(settings, config, ModelSizes.of(config), CEILINGS)
