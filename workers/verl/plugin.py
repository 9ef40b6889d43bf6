"""The entry point `verl.plugins`: importing this module registers everything with verl.

verl imports it in every process that imports verl, before anything of ours is needed. It drops an
exception raised here with a DEBUG line, after which the user would only see "Unknown backend:
longstraw" from some worker. So a failure is made loud: the traceback goes to stderr and to the log
at ERROR, the exception is raised again, and when the command line of this very process asks for
LongStraw the process ends, because the run could only fail later and less clearly.

The platform comes first: verl's engine modules ask for the platform while they are imported.
"""

import logging
import re
import sys
import traceback

logger = logging.getLogger(__name__)

_REMEDY = (
    "longstraw_backend could not register itself with verl; strategy, rollout and platform of "
    "that name will be unknown. Run `longstraw doctor` for a diagnosis."
)
_ASKS_FOR_LONGSTRAW = re.compile(
    r"^\+{0,2}(longstraw=|model_engine=longstraw|\S*strategy=longstraw|\S*rollout\.name=longstraw)"
)


class PluginBroken(SystemExit):
    """Ends a process that asked for LongStraw; `SystemExit` is what verl's loader lets through."""


def load_replica_class() -> type:
    """The rollout's replica class, imported when verl's driver first asks for it."""
    from longstraw_backend.workers.verl.rollout_server import LongStrawReplica

    return LongStrawReplica


def _register_rollout() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("longstraw", "async")] = (
        "longstraw_backend.workers.verl.rollout.LongStrawServerAdapter"
    )
    RolloutReplicaRegistry.register("longstraw", load_replica_class)


def _register_search_path() -> None:
    """Let Hydra find `model_engine=longstraw` and the other groups of `longstraw_backend.configs`.

    Registered here rather than from a `hydra_plugins` folder, which Hydra does not find in an
    editable install.
    """
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class LongStrawSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="longstraw", path="pkg://longstraw_backend.configs")

    Plugins.instance().register(LongStrawSearchPath)


def register_all() -> None:
    """Platform, rollout, engine, agent loop, search path, in the order verl needs."""
    import longstraw_backend.workers.verl.platform_cpu  # noqa: F401

    _register_rollout()

    import longstraw_backend.workers.verl.agent_loop
    import longstraw_backend.workers.verl.engine  # noqa: F401

    _register_search_path()


def _asked_for(arguments: list[str]) -> bool:
    return any(_ASKS_FOR_LONGSTRAW.match(argument) for argument in arguments)


def _load() -> None:
    try:
        register_all()
    except Exception as error:  # whatever it is, it must be seen before verl hides it
        text = f"{traceback.format_exc()}\n{_REMEDY}"
        print(text, file=sys.stderr, flush=True)
        logger.error("%s: %s", _REMEDY, error)
        if _asked_for(sys.argv[1:]):
            raise PluginBroken(_REMEDY) from error
        raise


_load()
