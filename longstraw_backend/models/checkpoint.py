"""Text models out of published checkpoints: names of weights, and what is kept aside.

Qwen3.5 and Qwen3.6 are published with a vision tower; these, Qwen3-Next, GLM and DeepSeek with
multi-token-prediction (MTP) layers. ``AutoModelForCausalLM`` takes the text model alone, and out of
a checkpoint with a vision tower it gives the weights shorter names:

    model.language_model.layers.0...   in the checkpoint, and for vLLM, which loads all of it
    model.layers.0...                  in memory

Weights that go to a rollout engine or back to disk get the published names again. On disk the
vision tower and the MTP layers are added as they were: the prompt is text, and nothing trains them.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from .families import FAMILIES
from .weights_on_disk import INDEX, WeightsOnDisk, sources_of

__all__ = [
    "checkpoint_folder",
    "checkpoint_name",
    "holds_more",
    "is_wrapped",
    "restore_checkpoint",
    "text_config",
    "text_name",
]

_ASIDE = re.compile(r"mtp\.|model\.visual\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INDEXER = ".self_attn.indexer."
_TEXT_MODEL = re.compile(r"^((?:base_model\.model\.)?model\.)(?!language_model\.)")
_WRAPPED_MODEL = re.compile(r"^((?:base_model\.model\.)?model\.)language_model\.")


def is_wrapped(config: Any) -> bool:
    """Whether a configuration is of a checkpoint with a supported text model and a vision tower."""
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
    """The published name of a weight of a text model out of a checkpoint with a vision tower, or of
    an adapter on it.

    >>> checkpoint_name("model.layers.0.mlp.up_proj.weight")
    'model.language_model.layers.0.mlp.up_proj.weight'
    """
    return _TEXT_MODEL.sub(r"\1language_model.", name)


def text_name(name: str) -> str:
    """The inverse of :func:`checkpoint_name`."""
    return _WRAPPED_MODEL.sub(r"\1", name)


def checkpoint_folder(path: str) -> Path:
    """The folder of a checkpoint that is loaded already: the path, or in the hub's cache."""
    if not Path(path).is_dir():
        try:
            return Path(snapshot_download(path, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            pass
    return Path(path)


def holds_more(original: Path) -> bool:
    """Whether a checkpoint has other weights, or other names, than its text model in memory."""
    published = WeightsOnDisk(original)
    wrapped = any(text_name(name) != name for name in published.files)
    return wrapped or bool(_not_loaded(published))


def restore_checkpoint(saved: Path, original: Path) -> None:
    """Make a saved text model the checkpoint it came from again, with its new weights.

    Weights get their published names, layout of experts and files. Parts that were not loaded are
    copied from the original, and so is its ``config.json``.

    Args:
        saved: folder with the text model's safetensors; rewritten.
        original: folder of the checkpoint that the model was loaded from.

    Raises:
        ValueError: the text model's weights are not those of the checkpoint; nothing is changed.
    """
    published, ours = WeightsOnDisk(original), WeightsOnDisk(saved)
    sources = _sources(published, ours)
    staging = saved / "restored"
    staging.mkdir()
    try:
        for file in sorted(set(published.files.values())):
            names = [name for name in published.files if published.files[name] == file]
            tensors = {name: _restored(name, published, ours, sources) for name in names}
            save_file(tensors, staging / file, metadata={"format": "pt"})
        for file in set(ours.files.values()):
            (saved / file).unlink()
        for path in list(staging.iterdir()):
            path.rename(saved / path.name)
    finally:
        shutil.rmtree(staging)
    index = {"metadata": {}, "weight_map": dict(sorted(published.files.items()))}
    (saved / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    shutil.copyfile(original / "config.json", saved / "config.json")


def _sources(published: WeightsOnDisk, ours: WeightsOnDisk) -> dict[str, tuple[str, ...]]:
    """By published name, which saved weights it is made of; what is not loaded is left out."""
    aside = _not_loaded(published) | {
        n for n in published.files if _INDEXER in n and text_name(n) not in ours.files
    }
    sources = {n: sources_of(text_name(n), ours.files) for n in published.files if n not in aside}
    used = {source for parts in sources.values() for source in parts}
    # Before 5.11, transformers makes GLM's layers that share a selection an indexer of their own.
    wrong = {n for n in used ^ ours.files.keys() if n in used or _INDEXER not in n}
    if wrong:
        raise _differ(published, ours, wrong)
    return sources


def _restored(
    name: str, published: WeightsOnDisk, ours: WeightsOnDisk, sources: dict[str, tuple[str, ...]]
) -> Tensor:
    if name not in sources:
        return published.read(name)
    tensor = ours.compose(text_name(name), sources[name])
    if list(tensor.shape) != published.shape(name):
        raise _differ(published, ours, {name})
    return tensor


def _differ(published: WeightsOnDisk, ours: WeightsOnDisk, names: set[str]) -> ValueError:
    return ValueError(
        f"checkpoint: {ours.folder} and {published.folder} differ in {len(names)} weights, "
        f"{min(names)} among them; the saved text model is left as it is"
    )


def _not_loaded(published: WeightsOnDisk) -> set[str]:
    """Weights of the vision tower and of MTP layers."""
    if not published.files:
        return set()
    config = json.loads((published.folder / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    return {
        name
        for name in published.files
        if _ASIDE.match(name) or ((m := _LAYER.match(text_name(name))) and int(m[1]) >= layers)
    }
