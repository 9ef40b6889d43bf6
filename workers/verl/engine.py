"""The LongStraw training engine of verl: capture each prompt once, replay its responses one by one.

Loading, LoRA, offload, optimizer, schedule, checkpoints and weight export are verl's FSDP engine;
what this class replaces is how a batch is run. Registered for ``strategy=longstraw`` on CPU and
CUDA. A forward-only instance serves as the reference policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from longstraw_backend.config import LongStrawConfig
from longstraw_backend.groups import Group
from longstraw_backend.models import drive
from longstraw_backend.models.checkpoint import (
    checkpoint_folder,
    checkpoint_name,
    is_wrapped,
    text_config,
)
from longstraw_backend.models.families import check_no_dropout, check_routers
from longstraw_backend.models.float32 import reload_float32
from longstraw_backend.oracle import gradients_of
from longstraw_backend.parallel import Layout, Lockstep
from longstraw_backend.parallel.failure import Alarm, armed
from longstraw_backend.parallel.finalize import clip_gradients
from longstraw_backend.parallel.replicas import check_replicas
from longstraw_backend.state import PromptKey, PromptStore
from longstraw_backend.walk import BatchRun, GroupWalk, Meter, Sample, Sampling, generate

from .batch import check_settings, groups_of, temperatures_of
from .checkpoints import PublishedCheckpoints, text_adapters
from .gradient_gap import gap_metrics, other_gradient, taken_gradients
from .live import LIVE
from .outputs import BatchOutputs
from .settings import overridden, refuse_settings
from .sharding import compute_dtype, offloads, sharded, sharing_experts

__all__ = ["LongStrawEngine"]

logger = logging.getLogger(__name__)


@EngineRegistry.register(model_type="language_model", backend="longstraw", device=["cpu", "cuda"])
class LongStrawEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine with capture, score and replay in place of padded or packed sequences.

    Attributes:
        layout: of all ranks; verl sees the data-parallel part of it.
        walk: the driven model with its prompt states.
        alarm: lets all ranks fail if one does; the engine then refuses to go on.
        version: of the weights; a prompt state of another version is stale.
        max_prompt_tokens: verl's ``data.max_prompt_length`` where known; such prompts are refused.
    """

    layout: Layout
    walk: GroupWalk
    lockstep: Lockstep
    alarm: Alarm

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        refuse_settings(model_config, engine_config)
        self.options: LongStrawConfig = (
            getattr(engine_config, "longstraw", None) or LongStrawConfig()
        )
        super().__init__(model_config, engine_config, *args, **kwargs)
        if self.options.activation_checkpointing is None:
            checkpointing = bool(model_config.enable_gradient_checkpointing)
            self.options = replace(self.options, activation_checkpointing=checkpointing)
        if engine_config.forward_only:  # its prompt states are never walked in reverse
            self.options = replace(self.options, gradient="response_only")
        self.max_prompt_tokens = self.options.max_prompt_tokens
        self.version = 0
        self.meter = Meter()
        self._adapters = True

    # --- layout of the ranks --------------------------------------------------------------------

    def _init_device_mesh(self) -> None:
        self.layout = Layout.of(get_device_name(), self.options.context_parallel_size)
        super()._init_device_mesh()

    def get_data_parallel_rank(self) -> int:
        """Which part of a batch this rank has, together with those that share its prompts."""
        return self.layout.data_rank

    def get_data_parallel_size(self) -> int:
        """Parts that a batch is cut into."""
        return self.layout.data_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that have the whole batch together."""
        return self.layout.data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether verl takes this rank's results: the first of those that share prompts."""
        return self.layout.collects

    # --- building -------------------------------------------------------------------------------

    def _build_module(self) -> nn.Module:
        whole = self.model_config.hf_config
        self._wrapped = is_wrapped(whole)
        with overridden(self.model_config, hf_config=text_config(whole)):
            module: Any = super()._build_module()
        module.gradient_checkpointing_disable()  # Hugging Face's drops the walk; ours does not
        self._driven = drive(module)
        self._original = checkpoint_folder(self.model_config.local_path)
        if module.dtype != torch.float32:  # the parent casts all that it loaded
            reload_float32(module, self._original)
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        path = getattr(self.model_config, "lora_adapter_path", None)
        with text_adapters(path) as adapters:
            with overridden(self.model_config, lora_adapter_path=adapters):
                wrapped: Any = super()._build_lora_module(module)
        if not isinstance(wrapped.get_base_model().lm_head, nn.Linear):
            raise ValueError(
                "target_modules: an adapter on lm_head is not supported; add it to exclude_modules"
            )
        return wrapped

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        check_no_dropout(module)
        check_routers(module)
        alone = dist.get_world_size() == 1
        self._autocast_dtype = compute_dtype(self.engine_config)
        plain = get_device_name() == "cpu" and alone
        if plain:
            module = module.to(get_device_id())
        else:
            module = self._sharded(module)
        self.lockstep = Lockstep(None if alone else dist.group.WORLD)
        watch = get_device_name() != "cpu" and not alone
        self.alarm = Alarm(None if plain else dist.group.WORLD, watch=watch)
        budgets = self.options.state_budget_gb, self.options.host_state_budget_gb
        store = PromptStore(*(gib * 2**30 for gib in budgets))
        quiet = not self.options.progress or self.rank != 0
        ranks = self.layout.ranks
        driven = replace(self._driven, module=module, device=_compute_device(), ranks=ranks)
        self.walk = GroupWalk(driven, self.options, store, quiet)
        return module

    def _sharded(self, module: nn.Module) -> nn.Module:
        if offloads(self.engine_config):  # FSDP moves parameters, verl must not
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
        self.layout = sharing_experts(self.layout, module, self.engine_config, self.options)
        return sharded(module, self.engine_config, self.layout, self.device_mesh)

    def initialize(self) -> None:
        """Build everything, and let the rollout of this process find the module."""
        super().initialize()
        self.checkpoint_manager = PublishedCheckpoints(
            self, original=self._original, wrapped=self._wrapped, lockstep=self.lockstep
        )
        LIVE["ref" if self.engine_config.forward_only else "actor"] = self

    # --- running a batch ------------------------------------------------------------------------

    @armed
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Score or replay all rows; see the base class. Groups are captured once each.

        Raises:
            ValueError: bad input, on every rank, before any other collective.
            RuntimeError: a rank failed; on every rank, with its message.
        """
        with self.lockstep.agree():
            check_settings(data)
            vocab_size = self.model_config.hf_config.get_text_config().vocab_size
            groups = groups_of(data, vocab_size, self.max_prompt_tokens)
            temperatures = temperatures_of(data)
        self._add_global_sizes(data)
        run = partial(self._run, data, loss_function, groups, temperatures, forward_only)
        if forward_only:
            return run(self.walk, self.meter).result({})
        due = self.options.report_gradient_gap_every
        if not due or self.version % due:
            return run(self.walk, self.meter).result(self._metrics())
        other = taken_gradients(self.module, lambda: run(self._other_walk(), Meter()))
        outputs = run(self.walk, self.meter)
        gap = gap_metrics(self.options.gradient, gradients_of(self.module), other, self.lockstep)
        return outputs.result(self._metrics() | gap)

    def _other_walk(self) -> GroupWalk:
        config = replace(self.walk.config, gradient=other_gradient(self.options.gradient))
        return replace(self.walk, config=config)

    def _run(
        self,
        data: TensorDict,
        loss_function: Callable[..., Any] | None,
        groups: list[Group],
        temperatures: list[float],
        forward_only: bool,
        walk: GroupWalk,
        meter: Meter,
    ) -> BatchOutputs:
        outputs = BatchOutputs(data, loss_function, self.get_data_parallel_group(), forward_only)
        run = BatchRun(
            walk,
            meter,
            self.lockstep,
            key=self._key,
            temperature=lambda row: temperatures[row.index],
            on_row=outputs.on_row,
            entropy=outputs.entropy,
            grad=not forward_only,
            last=lambda last: (
                nullcontext()
                if forward_only
                else self._gradient_sync_context(is_last_micro_batch=last)
            ),
        )
        with self._autocast():
            run.run(groups)
        return outputs

    def _add_global_sizes(self, data: TensorDict) -> None:
        tokens = data["loss_mask"].values().sum().to(get_device_id())
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(
            data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size()
        )

    def _key(self, group: Group) -> PromptKey:
        return self._prompt_key(group.digest)

    def _prompt_key(self, digest: bytes) -> PromptKey:
        return PromptKey(digest, self.version if self._adapters else 0, self._adapters)

    def _autocast(self) -> AbstractContextManager[None]:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(get_device_name(), dtype=self._autocast_dtype)

    def _metrics(self) -> dict[str, float]:
        """What happened since the last update, the reference policy of this process included."""
        metrics = self.meter.metrics()
        reference = LIVE.get("ref")
        if reference is not None:
            metrics |= {
                k.replace("longstraw/", "longstraw/ref_"): v
                for k, v in reference.meter.metrics().items()
            }
            reference.meter = Meter()
        self.meter = Meter()
        return metrics

    # --- rollout --------------------------------------------------------------------------------

    @armed
    def generate(self, prompt_ids: list[int], samplings: list[Sampling], seed: int) -> list[Sample]:
        """Draw one response to the prompt per entry of ``samplings``, from the trained module.

        With several ranks all must call it with the same arguments, and return the same.
        """
        prompt = torch.tensor(prompt_ids, dtype=torch.long)
        with self.eval_mode(), torch.no_grad(), self._autocast():
            return generate(
                self.walk, prompt, self._prompt_key, samplings, seed, self.meter, self.lockstep
            )

    # --- weights change -------------------------------------------------------------------------

    @armed
    def optimizer_step(self) -> float:
        """Clip by the norm over all ranks, and step; prompt states of the old weights are dropped.

        A norm that is not finite skips the step, on every rank since all have the same.

        Returns:
            The norm before.
        """
        norm = clip_gradients(self.module.parameters(), self.optimizer_config.clip_grad)
        try:
            if norm.isfinite():
                self.optimizer.step()
            else:
                logger.warning("gradient norm is %s: the step is skipped", norm.item())
                self.optimizer.zero_grad()
        finally:
            self._weights_changed()
        self.lockstep.most([])  # a rank that failed in its step has not come this far
        if self.options.check_replicas:
            check_replicas(self.module, self.optimizer)
        return norm.item()

    @armed
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save; see the base class."""
        super().save_checkpoint(*args, **kwargs)

    @armed
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load; prompt states of the old weights are dropped, the base model's too."""
        super().load_checkpoint(*args, **kwargs)
        self.walk.store.clear()
        self._weights_changed()

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """Export weights by the names of the published checkpoint; on a GPU the rollout engine now
        needs the memory of the prompt states."""
        if get_device_name() != "cpu":
            self.walk.store.clear()
        weights, adapters = super().get_per_tensor_param(*args, **kwargs)
        return self._published(weights), adapters

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        """This rank's shards of the weights, by the same names; see the base class."""
        shards, adapters = super().get_per_tensor_param_shard(**kwargs)
        return self._published(shards), adapters

    def _published(self, named: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        if not self._wrapped:
            return named
        return ((checkpoint_name(name), *rest) for name, *rest in named)

    def _weights_changed(self) -> None:
        self.version += 1
        self.walk.store.drop_stale(self.version)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base model: its prompt states are kept apart, and never go stale."""
        self._adapters = False
        try:
            with super().disable_adapter():
                yield
        finally:
            self._adapters = True


def _compute_device() -> torch.device:
    """Where forwards run; parameters may rest on the CPU (offload) between and during calls."""
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
