"""Where a run's numbers go: the terminal with an ETA, a JSONL file and TensorBoard."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from tensorboardX import SummaryWriter
from tqdm import tqdm

from vibethinker_jax.training.workdir import METRICS_FILE


class MetricsLog:
    """Writes one record per step. Only the first process of a multi-host run writes.

    Resuming from step k drops what an interrupted run had logged after k, so every step appears once.

    Args:
        workdir: the run's directory; gets metrics.jsonl and tensorboard/.
        first_step: steps already done.
        total_steps: steps of the whole run.
        shown: names of the metrics that the progress bar shows.
        description: what the progress bar says.
    """

    def __init__(
        self, workdir: epath.Path, first_step: int, total_steps: int, shown: tuple[str, ...], description: str
    ) -> None:
        self._shown = shown
        self._writes = jax.process_index() == 0
        self._last = time.monotonic()
        if not self._writes:
            return
        self._path = workdir / METRICS_FILE
        self._records = _records_until(self._path, first_step)
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step + 1, max_queue=1000)
        self._bar = tqdm(total=total_steps, initial=first_step, desc=description, unit="step", dynamic_ncols=True)
        # Rewritten aside and renamed: a kill never leaves half a history.
        _write_aside(self._path, self._records)
        self._stream = self._path.open("a")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the metrics of a finished step (1-based)."""
        if not self._writes:
            return
        now = time.monotonic()
        numbers = {name: float(value) for name, value in values.items()}
        record = {"step": step, "seconds": now - self._last, **numbers}
        self._last = now
        self._stream.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        self._stream.flush()
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                self._board.add_scalar(name, value, step)
        self._bar.set_postfix({name: f"{numbers[name]:.4g}" for name in self._shown if name in numbers}, refresh=False)
        self._bar.update(step - self._bar.n)

    def flush(self) -> None:
        """Makes sure that a kill from now on loses nothing that was written."""
        if self._writes:
            self._stream.flush()
            self._board.flush()

    def close(self) -> None:
        """Flushes everything."""
        if self._writes:
            self._bar.close()
            self._stream.close()
            self._board.close()


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, oldest first; a torn last line is left out."""
    return [json.loads(line) for line in _records_until(epath.Path(workdir) / METRICS_FILE, None)]


def _plain(value: float | int) -> float | int | None:
    return value if isinstance(value, int) or math.isfinite(value) else None


def _records_until(path: epath.Path, step: int | None) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [line for line in whole if step is None or json.loads(line)["step"] <= step]


def _write_aside(path: epath.Path, lines: list[str]) -> None:
    aside = path.parent / f"{path.name}.tmp"
    aside.write_text("".join(lines))
    aside.replace(path)
