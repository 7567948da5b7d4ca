"""A run's directory: the configuration it was started with, and what may change when it is resumed."""

import hashlib
import json

import jax
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.checkpoints.store import MODEL_DIRECTORY
from vibethinker_jax.errors import UserError
from vibethinker_jax.run_files import differing_fields, flatten, write_json

CONFIG_FILE = "run.json"
# What a run leaves once it has begun.
TRACES = ("metrics.jsonl", "rollouts", "checkpoints")
# What may differ between an interrupted run and its continuation: none of it changes the numbers.
FREE_FIELDS = ("loop.save_every", "loop.keep")


def open_workdir(workdir: epath.PathLike, config: ConfigDict) -> epath.Path:
    """Creates the directory, or checks that it holds a run of the same configuration.

    A run that stopped before its first step (bad data, say) has left nothing to lose: its place is taken.

    Raises:
        UserError: the directory holds another run; the message names the fields that differ.
    """
    workdir = epath.Path(workdir)
    path = workdir / CONFIG_FILE
    # Through JSON, so that tuples and lists compare equal.
    wanted = json.loads(json.dumps(config.to_dict()))
    started = any((workdir / name).exists() for name in TRACES)
    if path.exists() and started:
        found = json.loads(path.read_text())
        differing = [field for field in differing_fields(found, wanted) if field[0] not in FREE_FIELDS]
        if differing:
            names, (name, before, now) = ", ".join(field[0] for field in differing), differing[0]
            raise UserError(
                f"{path}: has a run with other settings ({names}); e.g. {name} was {before!r} and is {now!r} now. "
                "Resume with the same ones, or use a new workdir"
            )
    elif jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            (workdir / MODEL_DIRECTORY).rmtree(missing_ok=True)
        write_json(path, wanted)
    return workdir


def run_fingerprint(config: ConfigDict, step: int) -> str:
    """Names what the results of a step depend on: everything in the configuration that may not change, and the step."""
    fields = {name: value for name, value in flatten(config.to_dict()).items() if name not in FREE_FIELDS}
    return hashlib.sha256(json.dumps([fields, step], sort_keys=True).encode()).hexdigest()
