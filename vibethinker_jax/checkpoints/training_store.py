"""Checkpoints of a training run: parameters, optimizer state and metadata per step, through Orbax."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vibethinker_jax.checkpoints.checksum import tree_checksums
from vibethinker_jax.checkpoints.directory import absolute_path
from vibethinker_jax.checkpoints.store import CHECKPOINTS_DIRECTORY, CHECKSUMS_KEY, PARAMS_DIRECTORY
from vibethinker_jax.errors import UserError

_OPTIMIZER = "opt_state"
_METADATA = "metadata"
_USER_KEY = "run"


class TrainingStore:
    """The steps under WORKDIR/checkpoints. Use as a context manager, or `close` it.

    A step is there when it is complete: Orbax writes it aside and renames it (on an object store, marks it). All
    processes call every method together.
    """

    def __init__(self, workdir: epath.PathLike, keep: int | None = 3, asynchronous: bool = True):
        """Opens the store, creates its directory, and removes what interrupted saves have left.

        Args:
            workdir: the run's directory, local or gs://.
            keep: how many of the newest steps stay; None keeps all.
            asynchronous: return from `save` when the arrays are copied to the host, and write in the background.
        """
        self._path = absolute_path(workdir) / CHECKPOINTS_DIRECTORY
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=asynchronous, cleanup_tmp_directories=True
        )
        handlers = {
            PARAMS_DIRECTORY: ocp.StandardCheckpointHandler(),
            _OPTIMIZER: ocp.StandardCheckpointHandler(),
            _METADATA: ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._path, options=options, item_handlers=handlers)

    def __enter__(self) -> "TrainingStore":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def save(self, step: int, params: Any, opt_state: Any, metadata: Mapping[str, Any]) -> None:
        """Saves one step. The arrays may be donated as soon as this returns.

        Args:
            step: number of the step, larger than those saved before.
            params: pytree of jax.Arrays.
            opt_state: the same, e.g. an optax state.
            metadata: anything that JSON can hold.

        Raises:
            UserError: the step is there already.
        """
        if step in self._manager.all_steps():
            raise UserError(f"{self._path}: step {step} exists already; choose another workdir or remove it")
        checksums = {PARAMS_DIRECTORY: tree_checksums(params), _OPTIMIZER: tree_checksums(opt_state)}
        items = {
            PARAMS_DIRECTORY: ocp.args.StandardSave(params),
            _OPTIMIZER: ocp.args.StandardSave(opt_state),
            _METADATA: ocp.args.JsonSave({_USER_KEY: dict(metadata), CHECKSUMS_KEY: checksums}),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int | None, abstract: tuple[Any, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Restores a step straight to its devices.

        Args:
            step: which; None is the newest.
            abstract: (params, opt_state) as jax.ShapeDtypeStruct with shardings, or arrays to take these from. Decides
                the containers (tuples, NamedTuples, empty states) and where arrays go, on whatever mesh.

        Returns:
            (params, opt_state, metadata), bit for bit what was saved.

        Raises:
            UserError: there is no such step, an array has another shape or dtype there, or one is damaged.
        """
        steps = self._manager.all_steps()
        if not steps or (step is not None and step not in steps):
            wanted = "any step" if step is None else f"step {step}"
            have = f"choose one of {', '.join(map(str, steps))}" if steps else "start the run from its first step"
            raise UserError(f"{self._path}: does not have {wanted}; {have}")
        step = max(steps) if step is None else step
        self.wait()
        targets = dict(zip((PARAMS_DIRECTORY, _OPTIMIZER), map(_abstract, abstract), strict=True))
        self._check_leaves(step, targets)
        items: dict[str, Any] = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items, **{_METADATA: ocp.args.JsonRestore()}))
        for name in targets:
            found, written = tree_checksums(restored[name]), restored[_METADATA][CHECKSUMS_KEY][name]
            if damaged := [path for path in written if found.get(path) != written[path]]:
                raise UserError(
                    f"{self._path / str(step)}: {name} {', '.join(damaged[:3])} is damaged (checksum); remove the step "
                    "to continue from the one before"
                )
        return restored[PARAMS_DIRECTORY], restored[_OPTIMIZER], restored[_METADATA][_USER_KEY]

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """What `save` was given as metadata, of one step or the newest; raises UserError where there is none."""
        step = self.latest_step() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(f"{self._path}: does not have step {step}")
        self.wait()
        restored = self._manager.restore(step, args=ocp.args.Composite(**{_METADATA: ocp.args.JsonRestore()}))
        return restored[_METADATA][_USER_KEY]

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Waits until everything saved is on disk. Raises what writing in the background has raised."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then releases threads."""
        self.wait()
        self._manager.close()

    def _check_leaves(self, step: int, targets: Mapping[str, Any]) -> None:
        """Orbax converts dtypes silently; a run that resumes must not."""
        metadata = self._manager.item_metadata(step)
        for name, target in targets.items():
            stored = {
                _key(path): (tuple(leaf.shape), np.dtype(leaf.dtype))
                for path, leaf in jax.tree_util.tree_flatten_with_path(metadata[name].tree)[0]
            }
            for path, leaf in jax.tree_util.tree_flatten_with_path(target)[0]:
                wanted = (tuple(leaf.shape), np.dtype(leaf.dtype))
                if (found := stored.pop(_key(path), None)) != wanted:
                    there = "is absent" if found is None else f"is {found[1]}{list(found[0])}"
                    raise UserError(
                        f"{self._path / str(step)}: {name} {_key(path)} {there}, the run expects "
                        f"{wanted[1]}{list(wanted[0])}; resume with the configuration that the run began with"
                    )
            if stored:
                raise UserError(
                    f"{self._path / str(step)}: {name} has {', '.join(sorted(stored)[:3])}, which the run does not "
                    "expect; resume with the configuration that the run began with"
                )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def _key(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
