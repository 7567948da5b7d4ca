"""The loop around a training step: resume, log, checkpoint, and stop cleanly when told to."""

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
from vibethinker_jax.models.parameters import Params, abstract_params
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

    Args:
        workdir: holds checkpoints/, metrics.jsonl and tensorboard/.
        step: whose state is trained.
        initial_params: called only when there is no checkpoint.
        begin: called once with the number of steps done, before the first one: moves the data there.
        one_step: one optimizer step.
        position: JSON to store with a checkpoint: where the data and random streams stand after so many steps.
        total_steps: of the whole run.
        save_every: steps between checkpoints.
        keep: newest checkpoints kept.
        shown: metrics on the progress bar.
        description: of the progress bar.
    """
    store = TrainingStore(workdir, keep=keep)
    try:
        done = store.latest_step() or 0
        state = restore_state(store, done, step) if done else step.init(initial_params())
        begin(done)
        log = MetricsLog(workdir, done, total_steps, shown, description)
        with _on_sigterm() as stopping:
            for index in range(done, total_steps):
                state, values = one_step(state, index)
                log.write(index + 1, values)
                if (index + 1) % save_every == 0 or index + 1 == total_steps or stopping():
                    store.save(index + 1, state.params, state.opt_state, dict(position(index + 1)))
                if stopping() and index + 1 < total_steps:
                    store.wait()
                    log.close()
                    print(f"stopped by SIGTERM after step {index + 1}; saved in {workdir}", file=sys.stderr)
                    raise SystemExit(PREEMPTED)
        store.wait()
        log.close()
        return state
    finally:
        store.close()


def restore_state(store: TrainingStore, at: int, step: TrainStep) -> TrainState:
    """The state of a checkpoint, placed as the step wants it."""
    params = abstract_params(step.model)
    abstract = TrainState(params, jax.eval_shape(step.optimizer.init, params))
    if step.placement.mesh is not None:
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            step.state_shardings,
        )
    params, opt_state, _ = store.restore(at, abstract)
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
