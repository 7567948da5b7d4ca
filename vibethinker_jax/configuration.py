"""Reads a stage's configuration: a Python file with `get_config()`, and overrides of its fields."""

import difflib
import inspect
import os
import runpy
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from vibethinker_jax.errors import UserError
from vibethinker_jax.run_files import flatten


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """The configuration that command-line arguments ask for.

    Args:
        arguments: `--config FILE` or `--config FILE:ARGUMENT` (passed to get_config), and overrides
            `--config.a.b=value`, converted to the type that the field has.

    Raises:
        UserError: no such file or field, or a value of another type; names it.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "", flag_values=values)
    own = [a for a in arguments if not a.startswith("--config.")]
    overrides = [a for a in arguments if a.startswith("--config.")]
    try:
        rest = values(["vibethinker", *own])[1:]
    except flags.Error as error:
        raise UserError(f"{error}") from error
    if rest:
        raise UserError(f"cannot read {rest[0]!r}; write overrides as --config.a.b=value")
    if not values.config:
        raise UserError("--config is missing; name a configuration, e.g. --config configs/sft_stage1.py")
    config = _load(values.config)
    _override(config, overrides, values.config)
    return config


def _load(name: str) -> ConfigDict:
    path, _, argument = name.partition(":")
    if not os.path.isfile(path):
        raise UserError(f"--config {path}: no such file; the stages' configurations are in configs/")
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
        raise UserError(f"--config {path}: defines no get_config()")
    takes = len(inspect.signature(get_config).parameters)
    if argument and not takes:
        raise UserError(f"--config {name}: {path} takes nothing after a colon")
    return get_config(argument) if argument else get_config()


def _override(config: ConfigDict, overrides: Sequence[str], source: str) -> None:
    fields = flatten(config.to_dict())
    for override in overrides:
        field, equals, _ = override.removeprefix("--config.").partition("=")
        if not equals:
            raise UserError(f"{override}: write --config.{field}=VALUE")
        if field not in fields:
            near = difflib.get_close_matches(field, fields, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"{override}: {source} has no field {field}{hint}")
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["vibethinker", *overrides])
    try:
        values(["vibethinker", *overrides])
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(f"{error}") from error
