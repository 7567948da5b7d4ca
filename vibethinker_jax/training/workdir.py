"""A run's directory: the configuration it was started with, and what may change when it is resumed."""

import fnmatch
import hashlib
import json
from collections.abc import Iterable

import jax
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.checkpoints.store import CHECKPOINTS_DIRECTORY, MODEL_DIRECTORY
from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.multihost import barrier, from_first
from vibethinker_jax.run_files import differing_fields, flatten, write_json

CONFIG_FILE = "run.json"
ROLLOUTS_DIRECTORY = "rollouts"
METRICS_FILE = "metrics.jsonl"
# What may differ between an interrupted run and its continuation. The first changes no number,
FREE_FIELDS = ("loop.save_every", "loop.keep", "verifier.workers", "model.architecture")
# the second only how numbers are rounded.
ROUNDING_FIELDS = (
    "mesh.*",
    "micro_batch_rows",
    "remat",
    "attention.*",
    "model.head_chunk",
    "model.mlp_chunks",
    "optimizer.offload",
    "rollout.max_slots",
)


def open_workdir(workdir: epath.PathLike, config: ConfigDict) -> epath.Path:
    """Creates the directory, or checks that it holds a run of the same configuration.

    A run that stopped before it finished a step (bad data, too little memory) has left nothing to lose: its place is
    taken.

    Raises:
        UserError: the directory holds another run; the message names the fields that differ.
    """
    workdir = epath.Path(workdir)
    path = workdir / CONFIG_FILE
    # Through JSON, so that tuples and lists compare equal.
    wanted = json.loads(json.dumps(config.to_dict()))

    def prepare() -> list[str]:
        if not has_begun(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            for leftover in (MODEL_DIRECTORY, ROLLOUTS_DIRECTORY) if path.exists() else ():
                (workdir / leftover).rmtree(missing_ok=True)
            write_json(path, wanted)
            return []
        if not path.exists():
            raise UserError(f"{workdir}: has checkpoints or metrics but no {CONFIG_FILE}; use another workdir")
        differing = differing_fields(json.loads(path.read_text()), wanted)
        binding = [field for field in differing if not _matches(field[0], (*FREE_FIELDS, *ROUNDING_FIELDS))]
        if binding:
            names, (name, before, now) = ", ".join(field[0] for field in binding), binding[0]
            raise UserError(
                f"{path}: has a run with other settings ({names}); e.g. {name} was {before!r} and is {now!r} now. "
                "Resume with the same ones, or use a new workdir"
            )
        return [field[0] for field in differing if _matches(field[0], ROUNDING_FIELDS)]

    changed = from_first(prepare)
    barrier("workdir")
    if changed and jax.process_index() == 0:
        print(f"{workdir}: continues with other {', '.join(changed)}; results agree to rounding, not to the bit")
    return workdir


def has_begun(workdir: epath.Path) -> bool:
    """Whether a run in this directory has finished a step, or saved one."""
    checkpoints, metrics = workdir / CHECKPOINTS_DIRECTORY, workdir / METRICS_FILE
    saved = checkpoints.exists() and any(path.name.isdigit() for path in checkpoints.iterdir())
    return saved or (metrics.exists() and metrics.stat().length > 0)


def run_fingerprint(config: ConfigDict, step: int, data: str) -> str:
    """Names what the rollouts of a step depend on: the settings that bind a run, the step and the data."""
    fields = {
        name: value
        for name, value in flatten(config.to_dict()).items()
        if not _matches(name, (*FREE_FIELDS, *ROUNDING_FIELDS))
    }
    return hashlib.sha256(json.dumps([fields, step, data], sort_keys=True).encode()).hexdigest()


def digest(parts: Iterable[str | bytes]) -> str:
    """A hash of data that a run depends on, in order."""
    hashed = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        hashed.update(len(content).to_bytes(8, "big") + content)
    return hashed.hexdigest()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
