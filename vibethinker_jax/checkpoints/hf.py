"""Hugging Face checkpoints: opening, checking and reading. checkpoints/export.py writes them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.typing import DTypeLike
from tqdm import tqdm

from vibethinker_jax.checkpoints.assets import CONFIG_FILE
from vibethinker_jax.checkpoints.directory import absolute_path
from vibethinker_jax.checkpoints.layout import TensorKind, tensor_kinds
from vibethinker_jax.checkpoints.precision import (
    FLOAT32,
    bits,
    checkpoint_dtype,
    convert,
    convert_exactly,
)
from vibethinker_jax.checkpoints.safetensors import SafetensorsFile, TensorInfo
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# A constant that old transformers versions saved; rotary frequencies follow from rope_theta. Nothing else is ignored.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# Tables are read in pieces of this many bytes, so that memory never holds one twice.
_BLOCK_BYTES = 64 << 20


class HFCheckpoint:
    """A directory with config.json and safetensors files, complete and consistent as far as headers tell.

    Attributes:
        path: of the directory.
        config: the model's shape.
        redundant_head: whether the embedding is tied and stored a second time, bit for bit, as lm_head.weight.
    """

    def __init__(self, directory: epath.PathLike):
        """Opens the directory; reads config.json, the index and all headers, and a redundant head in full.

        Raises:
            UserError: naming the file and tensor: one is missing, unexpected, misshapen, stored twice, of a dtype
                that does not load, in a file that is damaged, or a tied head that differs from the embedding.
        """
        self.path = absolute_path(directory)
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such directory")
        self.config = Qwen2Config.from_file(self.path / CONFIG_FILE)
        self._files = _open_files(self.path)
        self.redundant_head = self.config.tie_word_embeddings and HEAD in self._files
        self._check_names()
        self._check_shapes()
        if self.redundant_head:
            self._check_redundant_head()

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor."""
        return self._files[name].tensors[name]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor, or its rows [start, stop), as stored."""
        return self._files[name].read(name, start, stop)

    def leaf_dtype(self, kind: TensorKind) -> np.dtype:
        """The dtype that holds all tensors of a kind exactly: theirs, or float32 where they differ."""
        dtypes = {self.info(name).dtype for name in kind.hf_names(self.config)}
        return dtypes.pop() if len(dtypes) == 1 else FLOAT32

    def mixed_dtypes(self) -> dict[str, str]:
        """Dtype names of those tensors that are stacked with tensors of another dtype."""
        return {
            name: str(self.info(name).dtype)
            for kind in tensor_kinds(self.config)
            for name in kind.hf_names(self.config)
            if self.info(name).dtype != self.leaf_dtype(kind)
        }

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor that the model needs, and of the redundant head."""
        for kind in tensor_kinds(self.config):
            for name in kind.hf_names(self.config):
                yield name, kind.hf_shape(self.config)
        if self.redundant_head:
            yield HEAD, (self.config.vocab_size, self.config.hidden_size)

    def _check_names(self) -> None:
        expected = {name for name, _ in self._expected()}
        if missing := sorted(expected - self._files.keys()):
            raise UserError(f"{self.path}: lacks {_some(missing)}, which {CONFIG_FILE} calls for; copy it again")
        extra = sorted(name for name in self._files.keys() - expected if not name.endswith(_IGNORED_SUFFIX))
        if extra:
            raise UserError(
                f"{self._files[extra[0]].path}: has {_some(extra)}, for which {CONFIG_FILE} has no place; "
                "check num_hidden_layers and model_type"
            )

    def _check_shapes(self) -> None:
        for name, shape in self._expected():
            if self.info(name).shape != shape:
                raise UserError(
                    f"{self._files[name].path}: tensor {name} has shape {list(self.info(name).shape)}, "
                    f"but {CONFIG_FILE} makes it {list(shape)}"
                )

    def _check_redundant_head(self) -> None:
        same = self.info(HEAD).dtype == self.info(EMBEDDING).dtype and all(
            np.array_equal(bits(self.read(HEAD, start, stop)), bits(self.read(EMBEDDING, start, stop)))
            for start, stop in _row_blocks(self.info(HEAD))
        )
        if not same:
            raise UserError(
                f"{self._files[HEAD].path}: {HEAD} differs from {EMBEDDING}, but {CONFIG_FILE} ties them; "
                "set tie_word_embeddings to false to keep the head, or remove it"
            )


def read_parameters(
    checkpoint: HFCheckpoint, shardings: Mapping[str, Any] | None = None, dtype: DTypeLike | None = None
) -> dict[str, Any]:
    """Reads all parameters, leaf by leaf, straight to where they belong.

    Every process reads what its own devices hold. Besides what is placed, the host holds one leaf at a time.

    Args:
        checkpoint: to read.
        shardings: a jax.sharding.Sharding per leaf of the parameter tree; None, for the tree or a leaf, means the
            default device.
        dtype: to convert to, rounding to the nearest; None keeps the file's (float32 for a leaf whose layers differ).

    Returns:
        The parameter tree of models/parameters.py as jax.Arrays, padded rows of the vocabulary zero.

    Raises:
        UserError: a file has been cut short, or `dtype` cannot hold a value.
    """
    params: dict[str, Any] = {}
    kinds = tensor_kinds(checkpoint.config)
    total = sum(checkpoint.info(name).nbytes for kind in kinds for name in kind.hf_names(checkpoint.config))
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"read {checkpoint.path.name}", disable=None) as progress:
        for kind in kinds:
            leaf = _read_placed_leaf(checkpoint, kind, get_leaf(shardings, kind.path), dtype)
            set_leaf(params, kind.path, jax.block_until_ready(leaf))
            progress.update(sum(checkpoint.info(name).nbytes for name in kind.hf_names(checkpoint.config)))
    return params


def read_leaf(checkpoint: HFCheckpoint, kind: TensorKind, dtype: DTypeLike | None = None) -> np.ndarray:
    """One whole leaf of the parameter tree in host memory; `dtype` as in `read_parameters`."""
    whole = tuple(slice(0, size) for size in kind.leaf_shape(checkpoint.config))
    return _read_shards(checkpoint, kind, [whole], _target_dtype(checkpoint, kind, dtype))[0]


def get_leaf(tree: Mapping[str, Any] | None, path: str) -> Any:
    """The entry of a nested dict at a path joined by slashes; None where the tree itself is None."""
    for key in path.split("/"):
        if tree is None:
            return None
        tree = tree[key]
    return tree


def set_leaf(tree: dict[str, Any], path: str, value: Any) -> None:
    """Sets the entry of a nested dict at a path joined by slashes, creating the dicts on the way."""
    *parents, last = path.split("/")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _target_dtype(checkpoint: HFCheckpoint, kind: TensorKind, dtype: DTypeLike | None) -> np.dtype:
    return checkpoint.leaf_dtype(kind) if dtype is None else checkpoint_dtype(dtype)


def _read_placed_leaf(
    checkpoint: HFCheckpoint, kind: TensorKind, sharding: jax.sharding.Sharding | None, dtype: DTypeLike | None
) -> jax.Array:
    if sharding is None:
        return jax.device_put(read_leaf(checkpoint, kind, dtype))
    shape, target = kind.leaf_shape(checkpoint.config), _target_dtype(checkpoint, kind, dtype)

    def bounds(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    # Replicas share a buffer: what is read is what is different on this host.
    places = {bounds(index) for index in sharding.addressable_devices_indices_map(shape).values()}
    indices = [tuple(slice(*pair) for pair in place) for place in places]
    buffers = dict(zip(places, _read_shards(checkpoint, kind, indices, target), strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[bounds(index)], dtype=target)


def _read_shards(
    checkpoint: HFCheckpoint, kind: TensorKind, indices: list[tuple[slice, ...]], dtype: np.dtype
) -> list[np.ndarray]:
    """Fills the parts of a leaf that `indices` (non-negative, step 1) select, passing over the files once."""
    shards = [np.zeros([part.stop - part.start for part in index], dtype) for index in indices]
    for start, rows in _leaf_blocks(checkpoint, kind, indices, dtype):
        for index, shard in zip(indices, shards, strict=True):
            begin, end = index[0].start, index[0].stop
            first, last = max(start, begin), min(start + len(rows), end)
            if first < last:
                shard[first - begin : last - begin] = rows[first - start : last - start, *index[1:]]
    return shards


def _leaf_blocks(
    checkpoint: HFCheckpoint, kind: TensorKind, indices: list[tuple[slice, ...]], dtype: np.dtype
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a leaf along its leading axis, only those that some index needs."""

    def needed(start: int, stop: int) -> bool:
        return any(start < index[0].stop and index[0].start < stop for index in indices)

    # A kind that mixes dtypes is stacked in float32 and must come back unchanged.
    change = convert_exactly if checkpoint.leaf_dtype(kind) == dtype else convert
    for layer, name in enumerate(kind.hf_names(checkpoint.config)):
        if kind.stacked:
            if needed(layer, layer + 1):
                tensor = kind.from_hf(checkpoint.read(name), checkpoint.config)
                yield layer, change(tensor, dtype, f"{checkpoint.path}: {name}")[None]
            continue
        for start, stop in _row_blocks(checkpoint.info(name)):
            if needed(start, stop):
                tensor = kind.from_hf(checkpoint.read(name, start, stop), checkpoint.config)
                yield start, change(tensor, dtype, f"{checkpoint.path}: {name}")


def _row_blocks(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """Intervals of rows that cover a tensor in pieces of about _BLOCK_BYTES."""
    rows = max(1, _BLOCK_BYTES * info.shape[0] // max(info.nbytes, 1))
    for start in range(0, info.shape[0], rows):
        yield start, min(start + rows, info.shape[0])


def _open_files(directory: epath.Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor in the directory."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise UserError(f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if index.exists():
        return _open_shards(index)
    found = sorted(path.name for path in directory.iterdir() if path.name.endswith((".safetensors", ".bin", ".pth")))
    advice = f"found {_some(found)}" if found else "found no weights at all"
    raise UserError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE} ({advice}); only safetensors load")


def _open_shards(index: epath.Path) -> dict[str, SafetensorsFile]:
    weight_map = _read_index(index)
    shards: dict[str, SafetensorsFile] = {}
    owner: dict[str, str] = {}  # tensor -> shard it was found in
    for file_name in sorted(set(weight_map.values())):
        if not (index.parent / file_name).exists():
            tensor = next(name for name, file in weight_map.items() if file == file_name)
            raise UserError(f"{index}: places {tensor} in {file_name}, which does not exist; copy that file too")
        shards[file_name] = SafetensorsFile(index.parent / file_name)
        for name in shards[file_name].tensors:
            if name in owner:
                raise UserError(f"{index.parent}: tensor {name} is in both {owner[name]} and {file_name}; remove one")
            if name not in weight_map:
                raise UserError(f"{shards[file_name].path}: tensor {name} is not in {index.name}; write it again")
            owner[name] = file_name
    for name, file_name in weight_map.items():
        if owner.get(name) != file_name:
            where = f"is in {owner[name]}" if name in owner else "is in none of its files"
            raise UserError(f"{index}: places {name} in {file_name}, but it {where}; write the index again")
    return {name: shards[file_name] for name, file_name in weight_map.items()}


def _read_index(index: epath.Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{index}: is not valid JSON ({error}); copy it again from its source") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{index}: has no weight_map; copy it again from its source") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is {str(weight_map)[:80]}; expected an object that maps tensors to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or "/" in file_name or not file_name.endswith(".safetensors"):
            raise UserError(f"{index}: places {name} in {file_name!r}; expected a safetensors file beside the index")
    return weight_map


def _some(names: list[str], limit: int = 3) -> str:
    """Names for a message: a few, and how many more."""
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
