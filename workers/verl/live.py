"""What lives in this worker process, by role.

verl builds the training engine and the rollout of a hybrid worker in one process but never
introduces them to each other: weights normally travel between them as a copy. LongStraw's rollout
decodes with the trained module itself, so the two have to meet somewhere, and verl leaves no other
place than the process. Keys:

    "actor"     the LongStraw engine of the policy, put there by its `initialize()`
    "ref"       the LongStraw engine of the reference policy, likewise
    "rollout"   the rollout adapter, put there when verl builds it after the engine

Nothing else belongs here, and only worker processes ever fill it.
"""

from typing import Any

LIVE: dict[str, Any] = {}
