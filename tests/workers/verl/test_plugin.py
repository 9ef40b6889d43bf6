"""verl loads the plugin by itself, and a broken one cannot be overlooked."""

import subprocess
import sys

import pytest

REGISTERED = """
import verl
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

print(get_platform().device_name)
print(EngineRegistry.get_engine_cls("language_model", "longstraw").__name__)
print(get_rollout_class("longstraw").__name__)
print(get_rollout_replica_class("longstraw").__name__)
print(_agent_loop_registry["longstraw_single_turn_agent"]["_target_"])
print("LongStrawSearchPath" in [p.__name__ for p in Plugins.instance().discover(SearchPathPlugin)])
"""

# A module that is None in sys.modules cannot be imported.
BROKEN = """
import sys
sys.modules["longstraw_backend.workers.verl.engine"] = None
import verl
print("went on")
"""


def python(code, env, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_verl_registers_everything(verl_env):
    done = python(REGISTERED, verl_env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "cpu",
        "LongStrawEngine",
        "LongStrawServerAdapter",
        "LongStrawReplica",
        "longstraw_backend.workers.verl.agent_loop.LongStrawAgentLoop",
        "True",
    ]


def test_importing_the_plugin_before_verl_works_too(verl_env):
    first = "import longstraw_backend.workers.verl.plugin\n"
    done = python(first + REGISTERED, verl_env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "LongStrawEngine"


def test_vllm_stays_selectable(verl_env):
    done = python(
        "import verl; from verl.workers.rollout.base import _ROLLOUT_REGISTRY as r\n"
        "print(r[('vllm', 'async')])",
        verl_env,
    )
    assert done.stdout.strip() == "verl.workers.rollout.vllm_rollout.ServerAdapter"


def test_broken_plugin_prints_its_traceback_and_the_remedy(verl_env):
    done = python(BROKEN, verl_env)
    assert done.stdout.strip() == "went on"  # a run with another strategy is not ours to end
    assert "Traceback" in done.stderr
    assert "longstraw_backend.workers.verl.engine" in done.stderr
    assert "longstraw doctor" in done.stderr


@pytest.mark.parametrize(
    "argument",
    [
        "model_engine=longstraw",
        "actor_rollout_ref.actor.strategy=longstraw",
        "actor_rollout_ref.rollout.name=longstraw",
        "+longstraw=cpu",
    ],
)
def test_broken_plugin_ends_a_run_that_asks_for_it(verl_env, argument):
    done = python(BROKEN, verl_env, "data.train_batch_size=4", argument)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "longstraw doctor" in done.stderr


def test_broken_plugin_leaves_other_runs_alone(verl_env):
    done = python(BROKEN, verl_env, "trainer.experiment_name=longstraw", "model_engine=dp")
    assert done.returncode == 0
