"""Collectives for use inside shard_map."""

import jax
from jax import lax


def reduce_scatter(x: jax.Array, axis_name: str, size: int, *, axis: int) -> jax.Array:
    """Sums over the devices of a mesh axis; each keeps its part of array dimension `axis`.

    Where the mesh axis covers a whole TPU slice XLA turns a plain reduce-scatter into an all-reduce of the full array
    followed by a slice: twice the traffic and the whole sum on every device. Two smaller reduce-scatters, over groups
    of devices, are left as they are.

    Args:
        x: dimension `axis` is a multiple of `size`.
        axis_name: a mesh axis that is manual here.
        size: of that mesh axis.
        axis: dimension to scatter.
    """
    outer = _factor(size)
    inner = size // outer
    if outer == 1:
        return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)
    # Device o * inner + i ends with part o * inner + i: first the outer index chooses among blocks of parts, in groups
    # of equal inner index, then the inner index among the parts of the block.
    across = [[o * inner + i for o in range(outer)] for i in range(inner)]
    within = [[o * inner + i for i in range(inner)] for o in range(outer)]
    x = lax.psum_scatter(x, axis_name, scatter_dimension=axis, axis_index_groups=across, tiled=True)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis, axis_index_groups=within, tiled=True)


def _factor(size: int) -> int:
    """The largest divisor of `size` that is at most its square root."""
    return max(divisor for divisor in range(1, int(size**0.5) + 1) if size % divisor == 0)
