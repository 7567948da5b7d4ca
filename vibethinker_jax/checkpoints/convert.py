"""Conversion between Hugging Face directories and policy checkpoints, with one leaf in memory at a time.

Without `dtype` both directions are exact: every tensor comes back with the bytes and dtype that it had.
"""

import functools
from typing import Any

import numpy as np
from etils import epath
from jax.typing import DTypeLike
from tqdm import tqdm

from vibethinker_jax.checkpoints.assets import Assets
from vibethinker_jax.checkpoints.checksum import host_checksum
from vibethinker_jax.checkpoints.directory import new_directory
from vibethinker_jax.checkpoints.export import write_hf
from vibethinker_jax.checkpoints.hf import HFCheckpoint, read_leaf, set_leaf
from vibethinker_jax.checkpoints.layout import TensorKind, tensor_kinds
from vibethinker_jax.checkpoints.orbax_tree import LazyLeaf, save_tree
from vibethinker_jax.checkpoints.precision import checkpoint_dtype
from vibethinker_jax.checkpoints.store import PARAMS_DIRECTORY, StoredParameters, policy_manifest


def hf_to_orbax(source: epath.PathLike, destination: epath.PathLike, dtype: DTypeLike | None = None) -> None:
    """Writes a Hugging Face directory as a policy checkpoint.

    Args:
        source: Hugging Face directory.
        destination: directory that does not exist yet, or is empty.
        dtype: to convert to, rounding to the nearest; config.json then declares it. None changes nothing.

    Raises:
        UserError: the source is incomplete or inconsistent (HFCheckpoint), or the destination is taken.
    """
    checkpoint = HFCheckpoint(source)
    target = None if dtype is None else checkpoint_dtype(dtype)
    config, kinds = checkpoint.config, tensor_kinds(checkpoint.config)
    assets = Assets.read(source, checkpoint.redundant_head)
    checksums: dict[str, int] = {}
    with (
        new_directory(destination) as directory,
        tqdm(total=len(kinds), unit="array", desc=f"write {epath.Path(destination).name}", disable=None) as progress,
    ):

        def make(kind: TensorKind) -> np.ndarray:
            leaf = read_leaf(checkpoint, kind, target)
            checksums[kind.path] = host_checksum(leaf)
            progress.update()
            return leaf

        tree: dict[str, Any] = {}
        for kind in kinds:
            stored = target or checkpoint.leaf_dtype(kind)
            leaf = LazyLeaf(kind.leaf_shape(config), stored, functools.partial(make, kind), kind.stacked)
            set_leaf(tree, kind.path, leaf)
        save_tree(directory / PARAMS_DIRECTORY, tree)
        assets.write_files(directory)
        assets.write_config(directory, config, target)
        mixed = {} if target else checkpoint.mixed_dtypes()
        policy_manifest(config, assets, checksums, mixed).write(directory)


def orbax_to_hf(
    source: epath.PathLike,
    destination: epath.PathLike,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    max_shard_bytes: float = 5e9,
) -> None:
    """Writes a policy or training checkpoint as a Hugging Face directory.

    Args:
        source: policy checkpoint or a run's working directory.
        destination: directory that does not exist yet, or is empty.
        step: of a training checkpoint; None is the newest.
        dtype: to convert to, rounding to the nearest. None keeps the parameters' dtypes.
        max_shard_bytes: see `write_hf`.

    Raises:
        UserError: the source is incomplete, damaged or has no such step, or the destination is taken.
    """
    stored = StoredParameters(source, step)
    write_hf(
        stored,
        stored.config,
        stored.assets,
        destination,
        dtype,
        max_shard_bytes=max_shard_bytes,
        tensor_dtypes=stored.tensor_dtypes,
        # A policy checkpoint's config.json says what its source said; training has its own dtype.
        declare_dtype=dtype is not None or stored.step is not None,
    )
