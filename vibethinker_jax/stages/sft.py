"""Supervised fine-tuning (VibeThinker-3B report, section 2.1.2).

1. Read the traces and tokenise them with the checkpoint's own chat template.
2. Plan the packed rows of every epoch: that gives the number of steps, which the schedule needs.
3. Train; every step is one global batch of rows, in micro-batches.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.data.chat import encode_examples
from vibethinker_jax.data.loader import Batch, PackedLoader
from vibethinker_jax.data.records import load_examples
from vibethinker_jax.errors import UserError
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.stages.start import Start, micro_batch_rows, optimizer_config, packed_forward, prepare
from vibethinker_jax.training.loop import train_loop
from vibethinker_jax.training.optimizer import make_optimizer
from vibethinker_jax.training.sft_step import sft_step
from vibethinker_jax.training.step import TrainState, row_share
from vibethinker_jax.training.workdir import digest


def run_sft(config: ConfigDict, workdir: epath.PathLike) -> epath.Path:
    """Trains, from scratch or from where an interrupted run stopped; returns the work directory.

    Raises:
        UserError: bad configuration or data; names the field or the line.
    """
    start = prepare(config, workdir)
    loader, data = make_loader(config, start)
    optimizer, schedule = make_optimizer(optimizer_config(config), start.model, loader.total_steps)
    step = sft_step(packed_forward(config, start.model, start.placement), optimizer, offload=config.optimizer.offload)

    def one_step(state: TrainState, done: int) -> tuple[TrainState, Mapping[str, Any]]:
        state, metrics = step(state, cut(next(loader), config, start.placement))
        return state, {**jax.device_get(metrics).summary(), "learning_rate": schedule(done)}

    def begin(done: int) -> None:
        loader.restore(min(done * config.global_batch_rows, loader.total_rows))

    train_loop(
        workdir=start.workdir,
        step=step,
        initial_params=start.initial_params,
        begin=begin,
        one_step=one_step,
        position=lambda done: {
            "row": min(done * config.global_batch_rows, loader.total_rows),
            "rows": loader.total_rows,
            "data": data,
        },
        total_steps=loader.total_steps,
        save_every=config.loop.save_every,
        keep=config.loop.keep,
        shown=("loss", "gradient_norm", "learning_rate"),
        description="sft",
    )
    return start.workdir


def make_loader(config: ConfigDict, start: Start) -> tuple[PackedLoader, str]:
    """The packed batches of the run, and a digest of the data; says what it left out."""
    rows = micro_batch_rows(config, start.placement)
    if config.global_batch_rows % rows:
        raise UserError(
            f"config.global_batch_rows is {config.global_batch_rows}; make it a multiple of micro_batch_rows {rows}"
        )
    examples = encode_examples(start.tokenizer, load_examples(config.data.path))
    index, count = row_share(start.placement)
    loader = PackedLoader(
        examples,
        sequence_length=config.sequence_length,
        global_batch_rows=config.global_batch_rows,
        seed=config.seed,
        epochs=config.data.epochs,
        max_segments=config.max_segments,
        process_index=index,
        process_count=count,
    )
    if jax.process_index() == 0:
        for reason, indices in loader.dropped.items():
            print(f"{config.data.path}: left out {len(indices)} of {len(examples)} examples: {reason}")
        print(
            f"sft: {len(examples)} examples, {loader.total_rows} rows of {config.sequence_length} tokens "
            f"({loader.fill_rate:.1%} filled) in "
            f"{config.data.epochs} epochs, {loader.total_steps} steps of {config.global_batch_rows} rows"
        )
    return loader, digest(example.tokens.tobytes() for example in examples)


def cut(batch: Batch, config: ConfigDict, placement: Placement) -> list[Batch]:
    """Cuts this process's rows of a global batch into equal micro-batches."""
    rows = micro_batch_rows(config, placement)
    pieces = config.global_batch_rows // rows
    if len(batch["tokens"]) % pieces:
        raise UserError(
            f"config.micro_batch_rows is {rows}; make it a multiple of the {row_share(placement)[1]} shares that "
            "processes hold of a batch"
        )
    split = {name: np.split(array, pieces) for name, array in batch.items()}
    return [{name: arrays[i] for name, arrays in split.items()} for i in range(pieces)]
