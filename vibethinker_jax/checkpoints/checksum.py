"""Checksums of arrays that depend on their bits and on nothing else, not on mesh, sharding or chunking.

Orbax does not notice a flipped bit in a chunk. A checksum here is the sum, modulo 2**32, of a hash of every
element's bits and its position: the order of summation is free, so each device sums what it holds. One changed
element always changes the sum (the hash is a bijection of the bits); several cancel with probability 2**-32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_POSITION = 0x9E3779B1  # odd constants with well mixed bits
_MULTIPLIER = 0x85EBCA6B
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32"}
_CHUNK = 1 << 20  # elements; temporaries stay in the processor's cache


def host_checksum(array: np.ndarray) -> int:
    """Checksum of an array in host memory, equal to `tree_checksums` of the same array on devices."""
    words = np.ascontiguousarray(array).reshape(-1).view(_unsigned(array.dtype))
    total = 0
    with np.errstate(over="ignore"):
        for start in range(0, words.size, _CHUNK):
            part = words[start : start + _CHUNK].astype(np.uint32)
            position = np.arange(start, start + part.size, dtype=np.uint64).astype(np.uint32)
            total += int(_hash(part, position).sum(dtype=np.uint64))
    return total % 2**32


def tree_checksums(tree: Any) -> dict[str, int]:
    """Checksum of every array of a pytree, by its path joined with slashes. All processes call and get all.

    Leaves are jax.Arrays of 1, 2 or 4 bytes per element, or numpy arrays of these.
    """
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    sums: dict[str, Any] = {}
    # One compilation for all arrays that live on the same devices; one jit cannot mix them.
    on_devices: dict[Any, dict[str, jax.Array]] = {}
    for name, leaf in named.items():
        if isinstance(leaf, jax.Array):
            on_devices.setdefault(frozenset(leaf.sharding.device_set), {})[name] = leaf
        else:
            sums[name] = host_checksum(np.asarray(leaf))
    for arrays in on_devices.values():
        sums |= _device_checksums(arrays)
    return {name: int(sums[name]) for name in named}


@functools.partial(jax.jit, inline=False)
def _device_checksums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def checksum(array: jax.Array) -> jax.Array:
        if array.dtype == jnp.bool_:
            array = array.astype(jnp.uint8)
        words = jax.lax.bitcast_convert_type(array, _unsigned(array.dtype)).astype(jnp.uint32)
        position = jnp.zeros(words.shape, jnp.uint32)
        stride = 1
        for axis in reversed(range(words.ndim)):
            position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= words.shape[axis]
        return jnp.sum(_hash(words, position), dtype=jnp.uint32)

    return {name: checksum(array) for name, array in arrays.items()}


def _hash(words: Any, position: Any) -> Any:
    mixed = (words ^ (position * np.uint32(_POSITION))) * np.uint32(_MULTIPLIER)
    return mixed ^ (mixed >> np.uint32(16))


def _unsigned(dtype: Any) -> np.dtype:
    if np.dtype(dtype).itemsize not in _UNSIGNED:
        raise TypeError(f"no checksum for {dtype}: elements of 1, 2 or 4 bytes are expected")
    return np.dtype(_UNSIGNED[np.dtype(dtype).itemsize])
