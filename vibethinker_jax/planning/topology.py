"""Named TPU topologies without a TPU: their devices, through libtpu's compiler, and what their memory holds."""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vibethinker_jax.errors import UserError
from vibethinker_jax.planning.chips import CHIPS, Chip

# Those that Google Cloud offers as one slice, up to 256 chips; libtpu knows more.
SHAPES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
}
NAMES = tuple(f"{chip}:{shape}" for chip, shapes in SHAPES.items() for shape in shapes)
# libtpu is a compiler here: it must not look for chips, nor for a VM's metadata, nor lock the ones that exist.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Compile seconds are part of the plan, and executables for absent chips cannot be read back.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


@dataclass(frozen=True)
class Topology:
    """Chips that programs are compiled for.

    Attributes:
        name: e.g. "v5e:4x4".
        chip: their peaks.
        devices: one per chip.
        hbm_bytes: memory of each that a program may use, as the compiler gives it.
    """

    name: str
    chip: Chip
    devices: Sequence[object]
    hbm_bytes: int


def set_environment() -> None:
    """Prepares this process for compiling; must come before JAX starts."""
    os.environ.update(ENVIRONMENT)


def open_topology(name: str) -> Topology:
    """The topology of a name "CHIP:SHAPE".

    Raises:
        UserError: libtpu is not installed, or the name is none that it knows.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UserError(
            f"--topology is {name!r}; write CHIP:SHAPE with a chip of {', '.join(CHIPS)}, one of {', '.join(NAMES)}"
        )
    require_libtpu()
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # libtpu raises what its version likes
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology {name}: {reason}; use one of {', '.join(NAMES)}") from error
    return Topology(name, CHIPS[kind], devices, usable_hbm(devices[0]))


def names_with(chips: int, *, multiples: bool) -> list[str]:
    """The topologies of NAMES with so many chips, or a multiple of them."""
    counts = {name: math.prod(int(size) for size in name.partition(":")[2].split("x")) for name in NAMES}
    return [name for name, count in counts.items() if count == chips or (multiples and count % chips == 0)]


def require_libtpu() -> None:
    """Raises UserError unless libtpu is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu is not installed; it compiles for TPUs, on any machine: pip install 'vibethinker-jax[tpu]'"
        )


def usable_hbm(device: object) -> int:
    """Bytes of HBM that a program may use, as the compiler reports it when refusing a program that needs too much."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    array = jax.ShapeDtypeStruct((1 << 45,), jnp.int8, sharding=sharding)
    try:
        jax.jit(lambda x: x + 1).lower(array).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = out_of_memory(str(error))
        if needed is not None:
            return needed[1]
        raise
    raise RuntimeError("the compiler accepted an array of 32 TiB on one chip")


_SIZE = r"([\d.]+)([KMGTP]?)i?B?"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_OUT_OF_MEMORY = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


def out_of_memory(message: str) -> tuple[int, int] | None:
    """(bytes needed, bytes available) of a compiler's complaint about HBM; None if it is about something else."""
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(message):
            return _bytes(*match.group(1, 2)), _bytes(*match.group(3, 4))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
