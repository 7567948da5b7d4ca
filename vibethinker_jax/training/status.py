"""What a run's directory says about the run, alive or dead."""

import json
import math
from typing import Any

from etils import epath

from vibethinker_jax.errors import UserError
from vibethinker_jax.training.metrics_log import read_metrics
from vibethinker_jax.training.workdir import CONFIG_FILE

# Shown if the run has them, in this order.
_COLUMNS = (
    "step",
    "seconds",
    "loss",
    "learning_rate",
    "gradient_norm",
    "reward",
    "tokens",
    "truncated",
    "groups/without_signal",
    "policy/entropy",
    "mismatch/k3",
    "mismatch/absolute_max",
)


def run_status(workdir: epath.PathLike) -> dict[str, Any]:
    """Stage, metrics per step and saved steps of a training work directory.

    Returns:
        {"workdir", "stage", "steps_done", "saved_steps", "metrics": records of metrics.jsonl}.

    Raises:
        UserError: `workdir` is not a training work directory.
    """
    workdir = epath.Path(workdir)
    if not (workdir / CONFIG_FILE).exists():
        raise UserError(f"{workdir}: has no {CONFIG_FILE}; name the --workdir of a training run")
    metrics = read_metrics(workdir)
    checkpoints = workdir / "checkpoints"
    saved = [int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()] if checkpoints.exists() else []
    return {
        "workdir": str(workdir),
        "stage": json.loads((workdir / CONFIG_FILE).read_text())["stage"],
        "steps_done": metrics[-1]["step"] if metrics else 0,
        "saved_steps": sorted(saved),
        "metrics": metrics,
    }


def format_status(status: dict[str, Any], last: int) -> str:
    """A table of the last steps for the terminal."""
    head = f"{status['workdir']}: {status['stage']}, {status['steps_done']} steps done, saved {status['saved_steps']}"
    records = status["metrics"][-last:]
    columns = [name for name in _COLUMNS if any(name in record for record in records)]
    rows = [columns, *([_cell(record.get(name)) for name in columns] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join([head, *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)])


def _cell(value: float | int | None) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
