"""A run's directory: the configuration it was started with, and what may change when it is resumed."""

import json
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.checkpoints.store import MODEL_DIRECTORY
from vibethinker_jax.errors import UserError

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
        before, now = flatten(found), flatten(wanted)
        differing = sorted(
            name for name in before.keys() | now.keys() if name not in FREE_FIELDS and before.get(name) != now.get(name)
        )
        if differing:
            name = differing[0]
            raise UserError(
                f"{path}: has a run with other settings ({', '.join(differing)}); e.g. {name} was "
                f"{before.get(name)!r} and is {now.get(name)!r} now. Resume with the same ones, or take a new workdir"
            )
    elif jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            (workdir / MODEL_DIRECTORY).rmtree(missing_ok=True)
        write_json(path, wanted)
    return workdir


def write_json(path: epath.Path, content: Any) -> None:
    """Writes a JSON file aside and renames it."""
    aside = path.parent / f"{path.name}.tmp"
    aside.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n")
    aside.replace(path)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out.update(flatten(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out
