"""What the verb `plan` does with its options."""

import itertools
import json
from collections.abc import Sequence

from vibethinker_jax.planning.topology import open_topology, require_libtpu, set_environment


def run(arguments: Sequence[str], topology: str, *, as_json: bool, search: bool, use_cache: bool) -> str:
    """Plans, or searches; returns what to print. Must run before JAX starts, which it makes a compiler for TPUs.

    Args:
        arguments: `--config FILE` and overrides, as for `train`.
        topology: e.g. "v5e:4x4".
        as_json: one JSON object instead of a table.
        search: try mesh shapes and remat policies for the training step.
        use_cache: take plans that were made before.

    Raises:
        UserError: bad configuration or topology, or libtpu is not installed.
    """
    set_environment()
    require_libtpu()
    from vibethinker_jax.configuration import read_config
    from vibethinker_jax.planning import plan as planner
    from vibethinker_jax.planning import report
    from vibethinker_jax.planning import search as searcher

    config, config_file = read_config(arguments), _config_file(arguments)
    if search:
        target = open_topology(topology)
        rows = searcher.search(config, config_file, topology, len(target.devices), use_cache=use_cache)
        result = {"config": config_file, "topology": topology, "hbm_bytes": target.hbm_bytes, "search": rows}
        return json.dumps(result) if as_json else report.format_search(rows, target.hbm_bytes)
    plan = planner.plan(config, config_file, topology, use_cache=use_cache)
    return json.dumps(plan) if as_json else report.format_plan(plan)


def _config_file(arguments: Sequence[str]) -> str:
    """The file of the last `--config FILE` or `--config=FILE`, without what get_config is given after a colon."""
    names = [after for before, after in itertools.pairwise(arguments) if before == "--config"]
    names += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    return names[-1].partition(":")[0]
