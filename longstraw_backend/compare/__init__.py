"""``longstraw compare``: one batch through capture and replay, and through ordinary training.

The same model, the same rows, the same loss on both sides; what differs is the lifetime of tensors.
Peak memory is what tensors held at most above what was allocated before: weights are left out,
gradients, prompt state and activations are in. On CUDA it is the caching allocator's peak; on a CPU
it comes from the allocation events of torch's profiler, in a run of its own: buffers that a maths
library keeps for itself are not seen. That run comes first and is the warm-up of the timed one.
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
