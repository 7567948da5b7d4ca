"""Policy checkpoints, and finding out what a path holds.

A policy checkpoint is a directory with the Hugging Face side files (config.json, tokenizer, ...), `params/` in
Orbax's format and our tree, and manifest.json, written last. A training checkpoint is a run's working directory:
`model/` with the side files, `checkpoints/STEP/` with parameters, optimizer state and metadata.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.typing import DTypeLike
from tqdm import tqdm

from vibethinker_jax.checkpoints.assets import CONFIG_FILE, Assets
from vibethinker_jax.checkpoints.checksum import host_checksum, tree_checksums
from vibethinker_jax.checkpoints.directory import PARTIAL_SUFFIX, absolute_path, is_main_process, new_directory
from vibethinker_jax.checkpoints.hf import INDEX_FILE, SINGLE_FILE, HFCheckpoint, get_leaf, read_parameters, set_leaf
from vibethinker_jax.checkpoints.layout import tensor_kinds
from vibethinker_jax.checkpoints.orbax_tree import SavedTree, save_tree
from vibethinker_jax.checkpoints.precision import checkpoint_dtype
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.config import Qwen2Config

Format = Literal["hf", "orbax", "training"]

MANIFEST_FILE = "manifest.json"
PARAMS_DIRECTORY = "params"
CHECKPOINTS_DIRECTORY = "checkpoints"
MODEL_DIRECTORY = "model"
CHECKSUMS_KEY = "checksums"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What config.json does not say about our files.

    Attributes:
        format: "vibethinker_jax.policy", or "vibethinker_jax.model" for a working directory's model/.
        vocab_size: rows of the vocabulary tables that mean something.
        padded_vocab_size: rows that they have.
        redundant_head: see Assets.
        tensor_dtypes: dtypes of Hugging Face tensors that were stacked with tensors of another dtype, by name.
        checksums: of the leaves (checkpoints/checksum.py), by path.
        version: of this file's format.
    """

    format: str
    vocab_size: int
    padded_vocab_size: int
    redundant_head: bool = False
    tensor_dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    version: int = _VERSION

    def write(self, directory: epath.Path) -> None:
        (directory / MANIFEST_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: epath.Path) -> "Manifest":
        """Raises UserError if the file is absent, malformed or of another version."""
        path = directory / MANIFEST_FILE
        if not path.exists():
            raise UserError(f"{path}: no such file; the checkpoint is incomplete, write it again")
        try:
            fields = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: is not valid JSON ({error}); write the checkpoint again") from error
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != _VERSION:
            raise UserError(f"{path}: version is {version!r}; this program reads version {_VERSION}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise UserError(f"{path}: has the wrong fields ({error}); write the checkpoint again") from error


def detect_format(path: epath.PathLike) -> Format:
    """What a local or gs:// directory holds: "hf", "orbax" (a policy checkpoint) or "training" (a run's directory).

    Raises:
        UserError: none of these, or an unfinished one.
    """
    path = absolute_path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such directory")
    if path.name.endswith(PARTIAL_SUFFIX):
        raise UserError(f"{path}: is left over from an interrupted write; write the checkpoint again")
    if (path / MODEL_DIRECTORY).is_dir() and (path / CHECKPOINTS_DIRECTORY).is_dir():
        return "training"
    if (path / MANIFEST_FILE).exists() and (path / PARAMS_DIRECTORY).is_dir():
        return "orbax"
    if (path / CONFIG_FILE).exists() and ((path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()):
        return "hf"
    raise UserError(
        f"{path}: holds no checkpoint; expected {CONFIG_FILE} with {SINGLE_FILE} or {INDEX_FILE} (Hugging Face), "
        f"{MANIFEST_FILE} with {PARAMS_DIRECTORY}/ (policy), or {MODEL_DIRECTORY}/ with {CHECKPOINTS_DIRECTORY}/ "
        "(training)"
    )


def model_directory(path: epath.PathLike) -> epath.Path:
    """Where config.json and the tokenizer's files of a checkpoint are, whatever its format."""
    path = absolute_path(path)
    return path / MODEL_DIRECTORY if detect_format(path) == "training" else path


def read_assets(path: epath.PathLike) -> Assets:
    """The side files of a checkpoint of any format. A Hugging Face one is checked as in HFCheckpoint."""
    directory = model_directory(path)
    if detect_format(path) == "hf":
        return Assets.read(directory, HFCheckpoint(directory).redundant_head)
    return Assets.read(directory, Manifest.read(directory).redundant_head)


def load_params(
    path: epath.PathLike,
    shardings: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Parameters of a checkpoint of any format; see `read_parameters` and `load_policy_params`."""
    if detect_format(path) == "hf":
        if step is not None:
            raise UserError(f"{path}: step is {step}, but a Hugging Face checkpoint has no steps; leave it out")
        return read_parameters(HFCheckpoint(path), shardings, dtype)
    return load_policy_params(path, shardings, dtype, step)


def save_policy(params: Mapping[str, Any], config: Qwen2Config, assets: Assets, destination: epath.PathLike) -> None:
    """Writes a policy checkpoint of parameters in memory. All processes call together.

    config.json comes to declare the parameters' dtype (where they have but one).

    Args:
        params: nested dict of jax.Arrays on any mesh, or numpy arrays.
        config: the model's shape.
        assets: files to go with the weights.
        destination: directory that does not exist yet, or is empty.
    """
    dtypes = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)}
    checksums = tree_checksums(params)
    with new_directory(destination) as directory:
        save_tree(directory / PARAMS_DIRECTORY, params)
        if is_main_process():
            assets.write_files(directory)
            assets.write_config(directory, config, dtypes.pop() if len(dtypes) == 1 else None)
            policy_manifest(config, assets, checksums).write(directory)


def policy_manifest(
    config: Qwen2Config, assets: Assets, checksums: Mapping[str, int], tensor_dtypes: Mapping[str, str] | None = None
) -> Manifest:
    """The manifest of a policy checkpoint."""
    return Manifest(
        "vibethinker_jax.policy",
        config.vocab_size,
        config.padded_vocab_size,
        assets.redundant_head,
        dict(tensor_dtypes or {}),
        checksums,
    )


def save_model_directory(config: Qwen2Config, assets: Assets, workdir: epath.PathLike) -> None:
    """Writes the side files of a training run to WORKDIR/model, or checks that they are there for the same model.

    Raises:
        UserError: the working directory belongs to a model of another shape.
    """
    directory = absolute_path(workdir) / MODEL_DIRECTORY
    if (directory / MANIFEST_FILE).exists():
        found = Qwen2Config.from_file(directory / CONFIG_FILE)
        if found != config:
            raise UserError(f"{directory}: belongs to {found}, this run has {config}; choose another workdir")
        return
    with new_directory(directory) as partial:
        if is_main_process():
            assets.write_files(partial)
            assets.write_config(partial, config)
            Manifest("vibethinker_jax.model", config.vocab_size, config.padded_vocab_size, assets.redundant_head).write(
                partial
            )


class StoredParameters:
    """Parameters of a policy or training checkpoint, restored leaf by leaf; a ParameterSource for `write_hf`.

    Attributes:
        config: the model's shape.
        assets: the side files.
        step: of a training checkpoint; None for a policy checkpoint.
        tensor_dtypes: see Manifest.
    """

    def __init__(self, path: epath.PathLike, step: int | None = None):
        """Opens the checkpoint; `step` None is the newest of a training checkpoint.

        Raises:
            UserError: there is no such step, or the parameters are not those that config.json calls for.
        """
        path = absolute_path(path)
        kind, directory = detect_format(path), model_directory(path)
        if kind == "hf":
            raise UserError(f"{path}: is a Hugging Face checkpoint; expected a policy or training checkpoint")
        manifest = Manifest.read(directory)
        self.config = Qwen2Config.from_file(directory / CONFIG_FILE)
        self.assets = Assets.read(directory, manifest.redundant_head)
        self.tensor_dtypes = manifest.tensor_dtypes
        self.step, self._checksums = None, manifest.checksums
        tree = path / PARAMS_DIRECTORY
        if kind == "training":
            self.step = _choose_step(path / CHECKPOINTS_DIRECTORY, step)
            tree = path / CHECKPOINTS_DIRECTORY / str(self.step) / PARAMS_DIRECTORY
            metadata = json.loads((tree.parent / "metadata" / "metadata").read_text())
            self._checksums = metadata[CHECKSUMS_KEY][PARAMS_DIRECTORY]
        elif step is not None:
            raise UserError(f"{path}: step is {step}, but a policy checkpoint has no steps; leave it out")
        self._saved = SavedTree(tree)
        self._check_shapes()
        self._current: tuple[str, np.ndarray] | None = None

    def abstract(self, path: str) -> jax.ShapeDtypeStruct:
        """Shape and stored dtype of a leaf."""
        return self._saved.leaves[path]

    def restore(self, path: str, sharding: jax.sharding.Sharding | None = None) -> Any:
        """One leaf in its stored dtype: a jax.Array placed by `sharding`, or a numpy array if that is None.

        Raises:
            UserError: the leaf is not what was written.
        """
        leaf = self._saved.restore(path, sharding)
        found = host_checksum(leaf) if sharding is None else tree_checksums(leaf)[""]
        if found != (written := self._checksums[path]):
            raise UserError(
                f"{self._saved.path}: parameter {path} is damaged (checksum {found}, written with {written}); "
                "restore the directory from a copy, or use another step"
            )
        return leaf

    def rows(self, path: str, start: int, stop: int) -> np.ndarray:
        """Rows of a leaf; the leaf last asked for stays in memory."""
        if self._current is None or self._current[0] != path:
            self._current = None  # frees the last leaf before the next one comes
            self._current = (path, self.restore(path))
        return self._current[1][start:stop]

    def _check_shapes(self) -> None:
        expected = {kind.path: kind.leaf_shape(self.config) for kind in tensor_kinds(self.config)}
        if expected.keys() != self._saved.leaves.keys():
            different = ", ".join(sorted(expected.keys() ^ self._saved.leaves.keys()))
            raise UserError(f"{self._saved.path}: parameters do not match {CONFIG_FILE}: {different}")
        for path, leaf in self._saved.leaves.items():
            if tuple(leaf.shape) != expected[path]:
                raise UserError(
                    f"{self._saved.path}: parameter {path} has shape {list(leaf.shape)}, "
                    f"but {CONFIG_FILE} makes it {list(expected[path])}"
                )


def load_policy_params(
    path: epath.PathLike,
    shardings: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Restores the parameters of a policy or training checkpoint, straight to where they belong.

    Args:
        path: of the checkpoint.
        shardings: a jax.sharding.Sharding per leaf; None, for the tree or a leaf, means the default device.
        dtype: to convert to, rounding to the nearest; None keeps the stored one.
        step: of a training checkpoint; None is the newest complete one.

    Raises:
        UserError: there is no such checkpoint or step, it does not fit its config.json, or it is damaged.
    """
    stored = StoredParameters(path, step)
    params: dict[str, Any] = {}
    kinds = tensor_kinds(stored.config)
    for kind in tqdm(kinds, unit="array", desc=f"restore {absolute_path(path).name}", disable=None):
        sharding = get_leaf(shardings, kind.path)
        leaf = stored.restore(kind.path, sharding)
        leaf = jax.device_put(leaf) if sharding is None else leaf
        if dtype is not None:
            leaf = _convert_on_device(leaf, checkpoint_dtype(dtype), f"{path}: {kind.path}")
        set_leaf(params, kind.path, jax.block_until_ready(leaf))
    return params


def _convert_on_device(leaf: jax.Array, dtype: np.dtype, what: str) -> jax.Array:
    if leaf.dtype == dtype:
        return leaf
    converted, fits = _convert_and_check(leaf, dtype)
    if not bool(fits):
        raise UserError(f"{what}: holds values too large for {dtype}; choose bfloat16 or float32 instead")
    return converted


@functools.partial(jax.jit, static_argnames="dtype")
def _convert_and_check(leaf: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    converted = leaf.astype(dtype)
    return converted, jnp.all(jnp.isfinite(converted) == jnp.isfinite(leaf))


def _choose_step(directory: epath.Path, step: int | None) -> int:
    steps = sorted(ocp.utils.checkpoint_steps(directory))
    if not steps:
        raise UserError(f"{directory}: has no complete step yet; wait for the run's first checkpoint")
    if step is not None and step not in steps:
        raise UserError(f"{directory}: has no step {step}; choose one of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step
