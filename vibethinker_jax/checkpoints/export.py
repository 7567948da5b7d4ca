"""Writing Hugging Face checkpoints, one tensor at a time."""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from tqdm import tqdm

from vibethinker_jax.checkpoints.assets import Assets
from vibethinker_jax.checkpoints.directory import is_main_process, new_directory
from vibethinker_jax.checkpoints.hf import HEAD, INDEX_FILE, SINGLE_FILE, get_leaf
from vibethinker_jax.checkpoints.layout import TensorKind, tensor_kinds
from vibethinker_jax.checkpoints.precision import checkpoint_dtype, convert, convert_exactly
from vibethinker_jax.checkpoints.safetensors import SafetensorsWriter
from vibethinker_jax.models.config import Qwen2Config

_BLOCK_BYTES = 64 << 20  # tables are gathered and written in pieces


class ParameterSource(Protocol):
    """Parameters that are handed out by rows, from memory, devices or disk."""

    def abstract(self, path: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a leaf."""
        ...

    def rows(self, path: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a leaf along its first axis. All processes call together."""
        ...


@dataclass(frozen=True)
class ArraySource:
    """A ParameterSource over a nested dict of jax.Arrays (on any mesh) or numpy arrays."""

    params: Mapping[str, Any]

    def abstract(self, path: str) -> jax.ShapeDtypeStruct:
        leaf = get_leaf(self.params, path)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def rows(self, path: str, start: int, stop: int) -> np.ndarray:
        leaf = get_leaf(self.params, path)
        if not isinstance(leaf, jax.Array):
            return leaf[start:stop]
        if not leaf.is_fully_addressable:
            return _gather_rows(leaf, start, stop)
        # Piece by piece from the shards: np.asarray(leaf) would keep a host copy of the whole leaf alive.
        rows = np.empty((stop - start, *leaf.shape[1:]), leaf.dtype)
        for shard in leaf.addressable_shards:
            begin, end = shard.index[0].indices(leaf.shape[0])[:2]
            first, last = max(start, begin), min(stop, end)
            if shard.replica_id == 0 and first < last:
                part = _rows(shard.data, first - begin, last - first)
                rows[first - start : last - start, *shard.index[1:]] = part
        return rows


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write: rows [start, stop) of the leaf of a kind."""

    name: str
    kind: TensorKind
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write_hf(
    params: Mapping[str, Any] | ParameterSource,
    config: Qwen2Config,
    assets: Assets,
    destination: epath.PathLike,
    dtype: DTypeLike | None = None,
    *,
    max_shard_bytes: float = 5e9,
    tensor_dtypes: Mapping[str, str] | None = None,
    declare_dtype: bool = True,
) -> None:
    """Writes a Hugging Face directory. Besides `params`, the host holds one tensor at a time.

    With several processes, all call together and the first one writes.

    Args:
        params: the parameter tree of models/parameters.py, as arrays on any mesh or as a ParameterSource.
        config: the model's shape.
        assets: files to go with the weights; a redundant head is written if they say so.
        destination: directory that does not exist yet, or is empty.
        dtype: to convert to, rounding to the nearest; None keeps the parameters'.
        max_shard_bytes: weights that fit go into model.safetensors, others into several files and an index.
        tensor_dtypes: dtype names of tensors that differ from their leaf's, used where `dtype` is None; the
            conversion has to be exact.
        declare_dtype: set the dtype field of config.json to the weights' dtype (where they have but one).

    Raises:
        UserError: `destination` is taken, or a value does not fit its dtype.
    """
    source = ArraySource(params) if isinstance(params, Mapping) else params
    tensors = _plan(source, config, assets, None if dtype is None else checkpoint_dtype(dtype), tensor_dtypes or {})
    shards = _shards(tensors, max_shard_bytes)
    dtypes = {tensor.dtype for tensor in tensors}
    total = sum(tensor.nbytes for tensor in tensors)
    with (
        new_directory(destination) as directory,
        tqdm(total=total, unit="B", unit_scale=True, desc=f"write {epath.Path(destination).name}", disable=None) as bar,
    ):
        for file_name, members in shards.items():
            _write_shard(directory / file_name, members, source, config, exact=dtype is None, progress=bar)
        if is_main_process():
            if list(shards) != [SINGLE_FILE]:
                weight_map = {tensor.name: file_name for file_name, members in shards.items() for tensor in members}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
                (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
            assets.write_files(directory)
            assets.write_config(directory, config, dtypes.pop() if declare_dtype and len(dtypes) == 1 else None)


def _plan(
    source: ParameterSource,
    config: Qwen2Config,
    assets: Assets,
    dtype: np.dtype | None,
    tensor_dtypes: Mapping[str, str],
) -> list[_Tensor]:
    """All tensors, leaf by leaf, since leaves are what a source can have to load."""
    tensors = []
    for kind in tensor_kinds(config):
        leaf, expected = source.abstract(kind.path), kind.leaf_shape(config)
        if leaf.shape != expected:
            raise ValueError(f"parameter {kind.path} has shape {leaf.shape}; the configuration makes it {expected}")
        shape = kind.hf_shape(config)
        for layer, name in enumerate(kind.hf_names(config)):
            start, stop = (layer, layer + 1) if kind.stacked else (0, shape[0])
            stored = checkpoint_dtype(tensor_dtypes.get(name, leaf.dtype))
            tensors.append(_Tensor(name, kind, dtype or stored, shape, start, stop))
        if kind.path == "embed/table" and config.tie_word_embeddings and assets.redundant_head:
            tensors.append(_Tensor(HEAD, kind, tensors[-1].dtype, shape, 0, shape[0]))
    return tensors


def _shards(tensors: list[_Tensor], max_bytes: float) -> dict[str, list[_Tensor]]:
    """Tensors by file, in order, each file as full as it gets."""
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(member.nbytes for member in groups[-1]) + tensor.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_shard(
    path: epath.Path, tensors: list[_Tensor], source: ParameterSource, config: Qwen2Config, exact: bool, progress: tqdm
) -> None:
    if not is_main_process():
        for tensor in tensors:  # takes part in gathering the rows
            for _ in _blocks(tensor, source, config, exact):
                pass
        return
    with SafetensorsWriter(path, [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]) as writer:
        for tensor in tensors:
            writer.write(tensor.name, _blocks(tensor, source, config, exact))
            progress.update(tensor.nbytes)


def _blocks(tensor: _Tensor, source: ParameterSource, config: Qwen2Config, exact: bool) -> Iterator[np.ndarray]:
    """The tensor in Hugging Face's layout, in pieces along its first axis."""
    change = convert_exactly if exact else convert
    if tensor.kind.stacked:
        rows = source.rows(tensor.kind.path, tensor.start, tensor.stop)[0]
        yield change(tensor.kind.to_hf(rows, config), tensor.dtype, tensor.name)
        return
    step = max(1, _BLOCK_BYTES * tensor.stop // max(tensor.nbytes, 1))
    for start in range(tensor.start, tensor.stop, step):
        rows = source.rows(tensor.kind.path, start, min(start + step, tensor.stop))
        yield change(tensor.kind.to_hf(rows, config), tensor.dtype, tensor.name)


@functools.partial(jax.jit, static_argnames=("count", "sharding"))
def _rows(leaf: jax.Array, start: int, count: int, sharding: NamedSharding | None = None) -> jax.Array:
    """Rows from a start that is traced, so that all layers share one compiled slice."""
    rows = jax.lax.dynamic_slice_in_dim(leaf, start, count)
    return rows if sharding is None else jax.lax.with_sharding_constraint(rows, sharding)


def _gather_rows(leaf: jax.Array, start: int, stop: int) -> np.ndarray:
    """Rows of an array that is spread over processes, in each of them."""
    everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return np.asarray(_rows(leaf, start, stop - start, everywhere).addressable_data(0))
