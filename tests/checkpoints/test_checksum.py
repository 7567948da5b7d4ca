"""Checksums: the same on host and devices however arrays are sharded, and different after any change."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vibethinker_jax.checkpoints.checksum import host_checksum, tree_checksums
from vibethinker_jax.parallel.mesh import make_mesh


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_])
def test_every_sharding_has_the_checksum_of_the_host(dtype: np.dtype) -> None:
    values = np.random.default_rng(0).standard_normal((8, 6, 4)).astype(dtype)
    mesh = make_mesh(fsdp=4, tensor=2)
    specs = [PartitionSpec(), PartitionSpec("fsdp", "tensor"), PartitionSpec(("fsdp", "tensor"), None, None)]
    tree = {f"{i}": jax.device_put(values, NamedSharding(mesh, spec)) for i, spec in enumerate(specs)}
    tree["single"] = jax.device_put(values)  # on one device: cannot share a computation with the others
    tree["host"] = values
    sums = tree_checksums(tree)
    assert set(sums.values()) == {host_checksum(values)}
    assert sums.keys() == tree.keys()


@hypothesis.given(hnp.arrays(np.uint16, hnp.array_shapes(max_dims=3, max_side=6)), st.data(), st.integers(0, 15))
def test_one_flipped_bit_changes_the_checksum(words: np.ndarray, data: st.DataObject, bit: int) -> None:
    changed = words.copy()
    changed.flat[data.draw(st.integers(0, words.size - 1))] ^= np.uint16(1 << bit)
    assert host_checksum(changed.view(np.float16)) != host_checksum(words.view(np.float16))


def test_exchanged_elements_change_the_checksum() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert host_checksum(values) != host_checksum(values[::-1])


def test_positions_continue_over_the_pieces_in_which_the_host_works() -> None:
    # More than one piece of 2**20 elements; the device does it in one.
    values = np.random.default_rng(1).standard_normal((3, 700_001)).astype(np.float32)
    assert tree_checksums(jnp.asarray(values)) == {"": host_checksum(values)}


def test_names_follow_the_tree_and_empty_states_have_none() -> None:
    state = optax.adam(1e-3).init({"w": jnp.ones((2, 3))})
    assert set(tree_checksums(state)) == {"0/count", "0/mu/w", "0/nu/w"}
