"""``longstraw bench``: how fast capture and replay are, against ceilings of the same machine.

``capture``, ``replay``, ``step`` and ``ladder`` run a model of a published shape with random
weights, after measuring what the machine can do at all; ``plan`` predicts bytes without a run and
``plot`` draws saved results. Times are wall times between waits for the device, after a warm-up.
Peaks are those of torch's CUDA allocator; on a CPU what tensors held in a run of one chunk or one
response that is made again for that.
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
