"""Parameter trees in Orbax's format, a leaf at a time, so that a tree larger than memory can be written and read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vibethinker_jax.errors import UserError

# Largest piece that is compressed and read as a unit.
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class LazyLeaf:
    """An array that `make` produces when it is this leaf's turn to be written. `stacked`: its first axis is layers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    stacked: bool = False


class _LazyLeafHandler(ocp.type_handlers.NumpyHandler):
    """Writes LazyLeafs one after the other; on disk they are ordinary numpy leaves."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)  # the copy would protect from changes that nobody can make

    async def serialize(
        self, values: Sequence[LazyLeaf], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.make()], [info], [arg]):
                written.result()  # before the next leaf is made
        return []


def save_tree(directory: epath.Path, tree: Mapping[str, Any]) -> None:
    """Writes a nested dict whose leaves are jax.Arrays, numpy arrays or LazyLeafs. All processes call together."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (LazyLeaf, _LazyLeafHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
    )

    def save_args(leaf: Any) -> ocp.SaveArgs:
        if not isinstance(leaf, LazyLeaf):
            return ocp.SaveArgs()
        return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if leaf.stacked else ())

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        arguments = ocp.args.PyTreeSave(tree, save_args=jax.tree.map(save_args, tree))
        checkpointer.save(directory, args=arguments)


class SavedTree:
    """A tree on disk. `leaves` has a jax.ShapeDtypeStruct per path joined by slashes."""

    def __init__(self, directory: epath.Path):
        """Reads the metadata. Raises UserError if there is no complete tree."""
        self.path = directory
        if not (directory / "_METADATA").exists():
            raise UserError(f"{directory}: holds no complete parameters; write the checkpoint again")
        self._handler = ocp.PyTreeCheckpointHandler()
        self._checkpointer = ocp.Checkpointer(self._handler)
        metadata = self._checkpointer.metadata(directory).item_metadata.tree
        self.leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/"): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in jax.tree_util.tree_flatten_with_path(metadata)[0]
        }

    def restore(self, path: str, sharding: jax.sharding.Sharding | None = None) -> Any:
        """One leaf in its stored dtype: a jax.Array placed by `sharding`, or a numpy array if that is None.

        Raises:
            UserError: a file is absent or cannot be decoded. Orbax does not notice all damage: compare checksums.
        """
        args: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is not None:
            args = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        item: Any = self.leaves[path]
        for key in reversed(path.split("/")):
            item, args = {key: item}, {key: args}
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
        try:
            restored = self._checkpointer.restore(self.path, args=arguments)
        except (ValueError, FileNotFoundError) as error:  # what TensorStore reports, in a page of text
            reason = str(error).partition("\n")[0][:200]
            raise UserError(
                f"{self.path}: parameter {path} cannot be read ({reason}); restore the directory from a copy"
            ) from error
        for key in path.split("/"):
            restored = restored[key]
        return restored
