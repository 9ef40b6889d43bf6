"""Text models out of published checkpoints: names of weights, and what is kept aside.

Qwen3.5 and Qwen3.6 are published with a vision tower and a multi-token-prediction (MTP) layer.
``AutoModelForCausalLM`` takes the text model alone and gives its weights shorter names:

    model.language_model.layers.0...   in the checkpoint, and for vLLM, which loads all of it
    model.layers.0...                  in memory

Weights that go to a rollout engine or back to disk get the published names again. On disk the
vision tower and the MTP layer are added as they were: the prompt is text, and nothing trains them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from .families import FAMILIES

__all__ = ["checkpoint_name", "is_wrapped", "restore_checkpoint", "text_config"]

_ASIDE = re.compile(r"mtp\.|model\.visual\.")
_TEXT_MODEL = re.compile(r"^((?:base_model\.model\.)?model\.)(?!language_model\.)")
_INDEX = "model.safetensors.index.json"


def is_wrapped(config: Any) -> bool:
    """Whether a configuration is of a checkpoint that holds more than a supported text model."""
    kind = str(getattr(config, "model_type", None))
    inner = getattr(getattr(config, "text_config", None), "model_type", None)
    expected = next((f.model_types[kind] for f in FAMILIES if kind in f.model_types), None)
    return expected is not None and inner == expected != kind


def text_config(config: Any) -> Any:
    """What to load a checkpoint with so that it gives the text model alone.

    Args:
        config: of the whole checkpoint; unchanged. One of a text model is returned as it is.
    """
    if not is_wrapped(config):
        return config
    inner = copy.deepcopy(config.text_config)
    inner.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(inner)].__name__]
    return inner


def checkpoint_name(name: str) -> str:
    """The published name of a parameter of a text model, or of an adapter on it.

    >>> checkpoint_name("model.layers.0.mlp.up_proj.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return _TEXT_MODEL.sub(r"\1language_model.", name)


def restore_checkpoint(saved: Path, original: Path) -> None:
    """Make a saved text model the checkpoint it came from again, with its new weights.

    Weights get their published names, parts that were not loaded are copied from the original, and
    so is its ``config.json``.

    Args:
        saved: folder with the text model's safetensors; rewritten.
        original: folder of the checkpoint that the model was loaded from.

    Raises:
        ValueError: the text model's weights are not those of the checkpoint; nothing is changed.
    """
    published, ours = _files_by_name(original), _files_by_name(saved)
    aside = {name for name in published if _ASIDE.match(name)}
    wrong = ({checkpoint_name(name) for name in ours} | aside) ^ published.keys()
    if wrong:
        raise ValueError(
            f"checkpoint: {saved} and {original} differ in {len(wrong)} weights, {min(wrong)} "
            "among them; the saved text model is left as it is"
        )
    files: dict[str, str] = {}
    for file in set(ours.values()):
        tensors = {checkpoint_name(k): v for k, v in load_file(saved / file).items()}
        save_file(tensors, saved / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    files |= _copy_aside(aside, published, original, saved)
    index = {"metadata": {}, "weight_map": dict(sorted(files.items()))}
    (saved / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    shutil.copyfile(original / "config.json", saved / "config.json")


def _copy_aside(
    names: set[str], files: dict[str, str], original: Path, saved: Path
) -> dict[str, str]:
    """Copy tensors, a file at a time; returns the new file of each."""
    copied: dict[str, str] = {}
    for number, file in enumerate(sorted({files[name] for name in names})):
        with safe_open(original / file, framework="pt") as source:
            tensors = {n: source.get_tensor(n) for n in sorted(names) if files[n] == file}
        target = f"model-aside-{number:05d}.safetensors"
        save_file(tensors, saved / target, metadata={"format": "pt"})
        copied |= dict.fromkeys(tensors, target)
    return copied


def _files_by_name(folder: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint."""
    if (folder / _INDEX).exists():
        weights: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return weights
    with safe_open(folder / "model.safetensors", framework="pt") as source:
        return dict.fromkeys(source.keys(), "model.safetensors")
