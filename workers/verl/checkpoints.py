"""What verl's checkpoints hold beside its shards: models and adapters as published.

With ``hf_model`` among the saved contents, ``huggingface/`` is a whole model; one that was taken
out of a larger checkpoint is put back into it. verl writes the inner names of an adapted model
there, which nothing loads; here the adapters are merged. ``lora_adapter/`` has the adapters alone,
always, by the names of the published checkpoint.

The shards are loaded by any number of ranks, not only by as many as saved them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_id
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import get_fsdp_full_state_dict
from verl.utils.transformers_compat import drop_tied_target_keys

from longstraw_backend.models.checkpoint import (
    checkpoint_name,
    holds_more,
    restore_checkpoint,
    text_name,
)
from longstraw_backend.parallel import Lockstep

from .resharding import load_model, load_optimizer, sharding_of
from .shard_files import read_shard, read_shards, saved_world_size

__all__ = ["PublishedCheckpoints", "text_adapters"]

_ADAPTER = "default"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class PublishedCheckpoints(FSDPCheckpointManager):
    """verl's checkpoints, with what goes into ``huggingface/`` and ``lora_adapter/`` as published.

    Args:
        engine: verl's, built.
        original: folder of the checkpoint that the model was loaded from.
        wrapped: it has a vision tower, and other names than the text model.
        lockstep: of all ranks that save.
    """

    checkpoint_save_contents: list[str]

    def __init__(self, engine: Any, *, original: Path, wrapped: bool, lockstep: Lockstep) -> None:
        super().__init__(
            model=engine.module,
            optimizer=engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
            processing_class=engine.model_config.get_processor(),
            checkpoint_config=engine.checkpoint_config,
            trust_remote_code=engine.model_config.trust_remote_code,
        )
        self.original, self.wrapped, self.lockstep = original, wrapped, lockstep
        self._partial = holds_more(original)

    def save_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """Save; see the base class.

        Raises:
            ValueError: on every rank; the model does not fit its original.
        """
        contents, adapted = self.checkpoint_save_contents, self._has_lora()
        if adapted:
            self.checkpoint_save_contents = [c for c in contents if c != "hf_model"]
        try:
            super().save_checkpoint(local_path, *args, **kwargs)
        finally:
            self.checkpoint_save_contents = contents
        if local_path is None:
            return
        if adapted:
            self._save_adapters(Path(local_path) / "lora_adapter")
        if self.should_save_hf_model:
            self._publish(Path(local_path) / "huggingface", adapted)

    def load_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """Load, whatever ranks saved and however they shared experts; see the base class.

        With another number of ranks than saved, random states are those of rank ``r % saved``. The
        folder must then be visible to every rank, as it must if experts are shared otherwise.

        Raises:
            ValueError: on every rank; files are missing or damaged, or do not fit the model.
        """
        if local_path is None or not Path(local_path).is_dir():
            super().load_checkpoint(local_path, *args, **kwargs)
            return
        folder = Path(local_path)
        with self.lockstep.agree():
            saved = saved_world_size(folder, self._kinds(), self.rank, self.world_size)
            alike = saved == self.world_size and self._sharded_alike(folder)
        if self.lockstep.most([int(not alike)]) == [0]:
            super().load_checkpoint(local_path, *args, **kwargs)
            return
        with self.lockstep.agree():
            self._reshard(folder, saved)

    def _sharded_alike(self, folder: Path) -> bool:
        if not self.should_load_model:
            return True
        saved, live = (
            read_shard(folder, "model", self.world_size, self.rank),
            self.model.state_dict(),
        )
        return all(
            sharding_of(saved[n]) == sharding_of(live[n]) for n in saved.keys() & live.keys()
        )

    def _kinds(self) -> list[str]:
        loaded = {
            "model": self.should_load_model,
            "optim": self.should_load_optimizer,
            "extra_state": self.should_load_extra,
        }
        return [kind for kind, wanted in loaded.items() if wanted]

    def _reshard(self, folder: Path, saved: int) -> None:
        if self.should_load_model:
            shards = read_shards(folder, "model", saved)
            load_model(self.model, shards, partial=self.is_lora_only_state_dict(shards[0]))
        if self.should_load_optimizer:
            names = {weight: name for name, weight in self.model.named_parameters()}
            load_optimizer(self.optimizer, names, read_shards(folder, "optim", saved))
        if self.should_load_extra:
            extra = read_shard(folder, "extra_state", saved, self.rank % saved)
            if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
            if "rng" in extra:  # old ones have none
                self.load_rng_state(extra["rng"])

    def _publish(self, folder: Path, adapted: bool) -> None:
        state = self._own_state() if adapted else {}
        with self.lockstep.agree():
            if self.rank == 0 and adapted:
                _save_merged(self.model, state, folder)
            if self.rank == 0 and self._partial:
                restore_checkpoint(folder, self.original)

    def _own_state(self) -> dict[str, Tensor]:
        """The whole state on the first rank's CPU; what lives there already is copied."""
        live = {_pointer(weight) for weight in self.model.state_dict().values()}
        state = get_fsdp_full_state_dict(self.model)
        return {n: w.clone() if _pointer(w) in live else w for n, w in state.items()}

    def _save_adapters(self, folder: Path) -> None:
        adapters = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        weights = {name: _gathered(weight) for name, weight in adapters.items()}
        if self.rank != 0:
            return
        folder.mkdir(exist_ok=True)
        config = copy.copy(self.model.peft_config[_ADAPTER])
        config.base_model_name_or_path, config.inference_mode = str(self.original), True
        config.save_pretrained(folder)
        if self.wrapped:
            _rename_targets(folder, checkpoint_name)
            weights = {checkpoint_name(name): weight for name, weight in weights.items()}
        save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def _save_merged(adapted: Any, state: dict[str, Tensor], folder: Path) -> None:
    """The base model with adapters added to its weights.

    Args:
        adapted: the model with adapters, maybe sharded; only its configurations are used.
        state: its whole state, on the CPU; base weights are changed in place.
    """
    config = adapted.get_base_model().config
    with torch.device("meta"):
        base: Any = AutoModelForCausalLM.from_config(config)
        copied: Any = get_peft_model(base, copy.deepcopy(adapted.peft_config[_ADAPTER]))
    copied.load_state_dict(state, assign=True)
    merged = copied.merge_and_unload()
    if (folder / "generation_config.json").exists():
        merged.generation_config = GenerationConfig.from_pretrained(folder)
    weights = merged.state_dict()
    drop_tied_target_keys(weights, merged, config)
    merged.save_pretrained(folder, state_dict=weights)


def _pointer(weight: Tensor) -> int:
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.untyped_storage().data_ptr()


def _gathered(weight: Any) -> Tensor:
    if isinstance(weight, DTensor):
        moved: Any = weight.to(get_device_id())
        weight = moved.full_tensor()
    whole: Tensor = weight.detach().cpu().contiguous()
    return whole


def _rename_targets(folder: Path, rename: Callable[[str], str]) -> None:
    """Rename the modules that an adapter's configuration lists by their whole names."""
    config = json.loads((folder / _CONFIG).read_text())
    for key in ("target_modules", "exclude_modules", "target_parameters"):
        if isinstance(config.get(key), list):
            config[key] = sorted(rename(name) for name in config[key])
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@contextmanager
def text_adapters(path: str | None) -> Iterator[str | None]:
    """Adapters by the names of the text model in memory, wherever they are needed renamed.

    Yields:
        the path itself, or a folder that exists within the context.
    """
    if path is None:
        yield None
        return
    folder = Path(copy_to_local(path))
    weights = load_file(folder / _WEIGHTS) if (folder / _WEIGHTS).exists() else {}
    if all(text_name(name) == name for name in weights):
        yield str(folder)
        return
    with TemporaryDirectory() as scratch:
        shutil.copyfile(folder / _CONFIG, Path(scratch) / _CONFIG)
        _rename_targets(Path(scratch), text_name)
        renamed = {text_name(name): weight for name, weight in weights.items()}
        save_file(renamed, Path(scratch) / _WEIGHTS, metadata={"format": "pt"})
        yield scratch
