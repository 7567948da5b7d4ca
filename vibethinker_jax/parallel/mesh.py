"""The device mesh: four named axes, always all four."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from vibethinker_jax.errors import UserError

# replica: data parallel across slices (over the data-centre network); fsdp: data parallel inside a slice;
# context: sequence; tensor: heads, MLP and vocabulary. Neighbouring devices sit along the last axes.
AXES = ("replica", "fsdp", "context", "tensor")


def make_mesh(
    replica: int = 1,
    fsdp: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arranges the devices in a mesh with axes (replica, fsdp, context, tensor).

    Args:
        replica, fsdp, context, tensor: sizes; at most one may be -1 and takes the devices that remain.
        devices: all devices of all processes by default.

    Raises:
        UserError: the sizes do not use the devices exactly.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(zip(AXES, (replica, fsdp, context, tensor), strict=True))
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise UserError(f"mesh.{name} is {size}; use a positive size, or -1 for the devices that remain")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"mesh: {' and '.join(free)} are both -1; only one axis can take the devices that remain")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"mesh needs {fixed} devices or a multiple ({product}), there are {len(devices)}; "
            f"change the sizes, e.g. mesh.fsdp=-1 with the other axes 1"
            if free
            else f"mesh needs {math.prod(sizes.values())} devices ({product}), there are {len(devices)}; "
            "change the sizes, or set one axis to -1 to take the devices that remain"
        )
    shape = tuple(sizes[name] for name in AXES)
    return Mesh(_arrange(devices, shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Devices in mesh order: following the physical torus on TPU, in enumeration order elsewhere."""
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)
