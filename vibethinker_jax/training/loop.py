"""The loop around a training step: resume, log, checkpoint, and stop cleanly when told to."""

import math
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from etils import epath

from vibethinker_jax.checkpoints.training_store import TrainingStore
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.parameters import Params, abstract_params
from vibethinker_jax.parallel.multihost import any_process
from vibethinker_jax.run_files import differing_fields
from vibethinker_jax.training.metrics_log import MetricsLog
from vibethinker_jax.training.step import TrainState, TrainStep

PREEMPTED = 42  # exit code after SIGTERM: everything is saved, start again to go on

# (state, steps done before this one) -> (new state, metrics)
OneStep = Callable[[TrainState, int], tuple[TrainState, Mapping[str, Any]]]


def train_loop(
    *,
    workdir: epath.Path,
    step: TrainStep,
    initial_params: Callable[[], Params],
    begin: Callable[[int], None],
    one_step: OneStep,
    position: Callable[[int], Mapping[str, Any]],
    total_steps: int,
    save_every: int,
    keep: int,
    shown: tuple[str, ...],
    description: str,
) -> TrainState:
    """Runs `one_step` until `total_steps`, from the newest checkpoint of the work directory if there is one.

    A checkpoint is written every `save_every` steps, at the end, and on SIGTERM (the process then exits with
    PREEMPTED). `one_step` depends on nothing but the state and the number of steps done, so an interrupted run
    that is started again ends with the same bits.

    Raises:
        UserError: the newest checkpoint belongs to other data.
        FloatingPointError: a step gave a gradient that is not finite; nothing of it is saved.

    Args:
        workdir: holds checkpoints/, metrics.jsonl and tensorboard/.
        step: whose state is trained.
        initial_params: called only when there is no checkpoint.
        begin: called once with the number of steps done, before the first one: moves the data there.
        one_step: one optimizer step.
        position: JSON to store with a checkpoint: where the data and random streams stand after so many steps, and
            which data. A checkpoint that stands elsewhere is refused.
        total_steps: of the whole run.
        save_every: steps between checkpoints.
        keep: newest checkpoints kept.
        shown: metrics on the progress bar.
        description: of the progress bar.
    """
    store = TrainingStore(workdir, keep=keep)
    log: MetricsLog | None = None
    try:
        done = store.latest_step() or 0
        state = restore_state(store, done, step, position(done)) if done else step.init(initial_params())
        begin(done)
        log = MetricsLog(workdir, done, total_steps, shown, description)
        with _on_sigterm() as stopping:
            for index in range(done, total_steps):
                state, values = one_step(state, index)
                _refuse_non_finite(values, index + 1, workdir)
                log.write(index + 1, values)
                last, stop = index + 1 == total_steps, any_process(stopping())
                if (index + 1) % save_every == 0 or last or stop:
                    store.save(index + 1, state.params, state.opt_state, dict(position(index + 1)))
                    log.flush()
                if stop and not last:
                    store.wait()
                    print(f"stopped by SIGTERM after step {index + 1}; saved in {workdir}", file=sys.stderr)
                    raise SystemExit(PREEMPTED)
        store.wait()
        return state
    finally:
        if log is not None:
            log.close()
        store.close()


def _refuse_non_finite(values: Mapping[str, Any], step: int, workdir: epath.Path) -> None:
    """Stops before a broken step can replace the last good checkpoint."""
    for name in ("gradient_norm", "update_norm"):
        if not math.isfinite(values[name]):
            raise FloatingPointError(
                f"{workdir}: {name} of step {step} is {values[name]}; nothing of this step is saved. Lower "
                "optimizer.peak or look at the data of this step, then start again from the last checkpoint"
            )


def restore_state(store: TrainingStore, at: int, step: TrainStep, position: Mapping[str, Any]) -> TrainState:
    """The state of a checkpoint, placed as the step wants it.

    Raises:
        UserError: the checkpoint was written with other data, or stands elsewhere in it, than `position` says.
    """
    params = abstract_params(step.model)
    abstract = TrainState(params, jax.eval_shape(step.optimizer.init, params))
    if step.placement.mesh is not None:
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            step.state_shardings,
        )
    params, opt_state, stored = store.restore(at, abstract)
    if differing := differing_fields(stored, position):
        name, before, now = differing[0]
        raise UserError(
            f"checkpoint of step {at}: {name} was {before!r} when it was written and is {now!r} now; the data has "
            "changed since the run began. Restore it, or use a new workdir"
        )
    return TrainState(params, opt_state)


@contextmanager
def _on_sigterm() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM into a flag that the loop reads between steps."""
    received = False

    def handle(_signal: int, _frame: types.FrameType | None) -> None:
        nonlocal received
        received = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals; a caller in another one has its own ways
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGTERM, before)
