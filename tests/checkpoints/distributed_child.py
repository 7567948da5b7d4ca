"""One of several processes with two devices each: python -m tests.checkpoints.distributed_child ADDRESS N I SOURCE OUT.

Loads a Hugging Face checkpoint on a mesh over all processes, saves it in every format and restores it.
"""

import os
import pathlib
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vibethinker_jax.checkpoints.export import write_hf
from vibethinker_jax.checkpoints.hf import HFCheckpoint
from vibethinker_jax.checkpoints.store import load_params, read_assets, save_model_directory, save_policy
from vibethinker_jax.checkpoints.training_store import TrainingStore
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement


def assert_identical(actual: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()


def main(source: str, destination: pathlib.Path) -> None:
    config, assets = HFCheckpoint(source).config, read_assets(source)
    placement = Placement(make_mesh(fsdp=2, tensor=2))
    shardings = parameter_shardings(config, placement)
    params = load_params(source, shardings)
    assert not params["layers"]["mlp"]["up"]["kernel"].is_fully_addressable

    write_hf(params, config, assets, destination / "hf", max_shard_bytes=30_000)
    save_policy(params, config, assets, destination / "policy")
    assert_identical(load_params(destination / "policy", shardings), params)

    # Scalars such as the count have to live on the mesh too: Orbax saves no array of one process among several.
    optimizer = optax.adamw(1e-3)
    on_mesh = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: placement.replicated(),
    )
    state = jax.jit(optimizer.init, out_shardings=on_mesh)(params)
    save_model_directory(config, assets, destination / "run")
    with TrainingStore(destination / "run") as store:
        store.save(3, params, state, {"step": 3})
        doubled = jax.tree.map(lambda leaf: leaf * jnp.asarray(2, leaf.dtype), params)
        store.save(4, doubled, state, {"step": 4})
        restored, restored_state, metadata = store.restore(3, (params, state))
        assert store.all_steps() == [3, 4]
    assert metadata == {"step": 3}
    assert_identical(restored, params)
    assert_identical(restored_state, state)
    assert_identical(load_params(destination / "run", shardings, step=3), params)


address, count, index, *paths = sys.argv[1:]
jax.distributed.initialize(address, num_processes=int(count), process_id=int(index))
main(paths[0], pathlib.Path(paths[1]))
