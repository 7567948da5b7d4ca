"""ZeRO-3 by hand: the weights of one layer, gathered where they are used, their gradients scattered where they arise.

Left to itself the TPU compiler multiplies piece by piece as the pieces of a weight arrive, in float32 accumulators of
the activations' size, and keeps a second copy of all layers in the compute dtype. Here each layer gathers its own
weights, in the compute dtype, when it runs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import Params, is_spec, map_specs, parameter_specs
from vibethinker_jax.parallel.rules import Placement

Axes = tuple[str | None, ...]


def pin_to_layer(layer: Params, index: Int[Array, ""], config: Qwen2Config, dtype: jax.typing.DTypeLike) -> Params:
    """The same parameters, in a way that keeps what is done with them inside the loop over layers.

    The compiler would otherwise convert the stacked kernels of all layers before the loop begins and hold both copies
    throughout (0.3 GiB of a 3B step on 16 chips); it does so across an optimization barrier too. A factor of one that
    depends on the loop's counter stops it, and costs nothing beside the conversion that it is fused with.

    Args:
        layer: a slice of the stacked layers.
        index: the layer's number.
        dtype: of the computation; without a conversion there is nothing to keep inside.
    """
    one = (index < config.num_layers).astype(jnp.float32)
    return jax.tree.map(lambda array: array if array.dtype == jnp.dtype(dtype) else array * one, layer)


def gather_layer(layer: Params, config: Qwen2Config, placement: Placement, dtype: jax.typing.DTypeLike) -> Params:
    """Parameters of one layer, or some of its parts, for its computation: no axis sharded over fsdp or context.

    The gradients come back in the dtype and the placement of the arguments.

    Args:
        layer: parts of a slice of the stacked layers, as models/parameters.py describes them.
        dtype: of the computation, and of the kernels returned. Norm scales and biases keep their own.
    """

    def gather(path: tuple[Any, ...], spec: Any, array: jax.Array) -> jax.Array:
        target = dtype if path[-1].key == "kernel" else array.dtype
        return _gather(array, spec.axes[1:], placement, str(jnp.dtype(target)))

    specs = {name: part for name, part in parameter_specs(config)["layers"].items() if name in layer}
    return jax.tree_util.tree_map_with_path(gather, specs, layer, is_leaf=is_spec)


def mlp_chunk(mlp: Params, index: Int[Array, ""], config: Qwen2Config, chunks: int) -> Params:
    """The kernels of an MLP for one of `chunks` equal parts of its inner width."""
    width = config.intermediate_size // chunks

    def cut(spec: Any, kernel: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(kernel, index * width, width, axis=spec.axes[1:].index("mlp"))

    return map_specs(cut, parameter_specs(config)["layers"]["mlp"], mlp)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(array: jax.Array, axes: Axes, placement: Placement, dtype: str) -> jax.Array:
    local = placement.constrain(array.astype(dtype), *axes)
    return placement.constrain(local, *(None if axis == "embed" else axis for axis in axes))


def _forward(array: jax.Array, axes: Axes, placement: Placement, dtype: str) -> tuple[jax.Array, jax.Array]:
    return _gather(array, axes, placement, dtype), array[:0]  # no elements: only its dtype is needed


def _backward(axes: Axes, placement: Placement, dtype: str, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    del dtype
    # Widened first: what the devices add up is float32.
    return (placement.constrain(gradient.astype(like.dtype), *axes),)


_gather.defvjp(_forward, _backward)
