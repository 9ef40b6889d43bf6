"""The part of ``longstraw doctor`` that needs verl: does verl get everything of ours?

    python -m longstraw_backend.workers.verl.doctor FINDINGS.json

runs in a process of its own and writes a list of findings. verl is imported without its plugins
and ours is then loaded as verl would load it, since verl drops the exception of one that fails.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

GROUP, NAME = "verl.plugins", "longstraw"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
REINSTALL = "verl finds LongStraw by it: reinstall longstraw-backend in verl's environment"
Finding = dict[str, str]


def check_entry_point() -> str:
    """The entry point that verl looks for, and whether verl is told to load it.

    Raises:
        LookupError: there is none, or verl would skip it.
    """
    found = {point.value for point in entry_points(group=GROUP, name=NAME)}
    if not found:
        raise LookupError(f"no entry point {NAME} in {GROUP}; {REINSTALL}")
    policy = os.environ.get(POLICY, "auto").strip()
    allowed = {name.strip() for name in policy.split(",")}
    if policy.lower() == "none" or (policy.lower() != "auto" and NAME not in allowed):
        raise LookupError(f"{POLICY}={policy} keeps verl from loading it; unset it or add {NAME}")
    return ", ".join(sorted(found))


def check_plugin() -> str:
    """Import verl, then what the entry point names; importing it registers everything."""
    os.environ[POLICY] = "none"
    import verl

    for point in entry_points(group=GROUP, name=NAME):
        point.load()
    return f"imported by verl {verl.__version__}"


def check_engine() -> str:
    """The engine that verl creates for strategy=longstraw on this device."""
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.get_engine_cls("language_model", "longstraw")
    return f"{engine.__name__} on {get_device_name()}"


def check_rollout() -> str:
    """The classes that verl creates for rollout.name=longstraw."""
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    worker, replica = get_rollout_class("longstraw"), RolloutReplicaRegistry.get("longstraw")
    return f"{worker.__name__}, {replica.__name__}"


def check_hydra() -> str:
    """The configuration that model_engine=longstraw gives."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["model_engine=longstraw"])
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy != "longstraw":
        raise LookupError(f"actor_rollout_ref.actor.strategy is {strategy!r}, not 'longstraw'")
    return f"actor.strategy={strategy}"


CHECKS: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("entry point", check_entry_point, "without it verl knows nothing of LongStraw"),
    ("plugin", check_plugin, "importing it registers engine, rollout and configuration"),
    ("engine", check_engine, "needed for actor_rollout_ref.actor.strategy=longstraw"),
    ("rollout", check_rollout, "needed for actor_rollout_ref.rollout.name=longstraw"),
    ("configuration", check_hydra, "needed for model_engine=longstraw on the command line"),
)


def attempt(name: str, check: Callable[[], str], purpose: str) -> Finding:
    """Run one check; whatever it raises is the finding."""
    try:
        return {"name": name, "state": "ok", "found": check()}
    except Exception as error:  # a broken installation fails in any way, and all are to be shown
        line = (str(error).strip().splitlines() or [""])[0]
        return {
            "name": name,
            "state": "failed",
            "found": f"{type(error).__name__}: {line}"[:300],
            "remedy": f"{purpose}; the error and its traceback are below",
            "detail": traceback.format_exc(),
        }


def diagnose() -> list[Finding]:
    """All findings; without the plugin the checks that rest on it are left out."""
    findings = []
    for name, check, purpose in CHECKS:
        findings.append(attempt(name, check, purpose))
        if name == "plugin" and findings[-1]["state"] == "failed":
            break
    return findings


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(diagnose()))
