"""Packed batches: documents laid into rows, and the loader that serves them to every process of a run."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import grain
import numpy as np
from jaxtyping import Shaped

from vibethinker_jax.data.chat import EncodedExample
from vibethinker_jax.data.row_plan import RowPlan, plan_rows
from vibethinker_jax.errors import UserError

# name -> [rows, sequence_length], or [rows, max_segments] for what belongs to a whole document
Batch = dict[str, Shaped[np.ndarray, "rows _"]]

PADDING_ROW = -1  # in place of a row number: a row of padding alone

_STANDARD = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "loss_weights": np.float32,
}


def pack_rows(
    examples: Sequence[EncodedExample],
    plan: RowPlan,
    rows: Sequence[int],
    sequence_length: int,
    max_segments: int | None = None,
) -> Batch:
    """Builds a packed batch in target alignment: position t of a row predicts the next token of its document.

    Args:
        examples: the documents that `plan` was made for; all name the same extras.
        plan: of `plan_rows` with the same `sequence_length`.
        rows: row numbers of the plan, or `PADDING_ROW` for rows of zeros.
        sequence_length: tokens per row.
        max_segments: most documents per row, the width of segment extras; needed only for those.

    Returns:
        numpy arrays, zero in padding:
        - tokens, targets int32[rows, sequence_length]: targets[t] is the token that follows tokens[t] in its
          document, 0 at the last one;
        - positions int32[rows, sequence_length]: from 0 in every document;
        - segment_ids int32[rows, sequence_length]: 1, 2, ... per row, 0 for padding;
        - loss_weights float32[rows, sequence_length]: 1 where targets[t] is a token to train, the end of the turn
          included, whatever its id;
        - each token extra, float32[rows, sequence_length], at the position that predicts its token (so the value of
          a document's first token, which nothing predicts, is left out);
        - each segment extra, float32[rows, max_segments], segment i in column i - 1.

    Raises:
        UserError: documents that do not match the plan, or extras that do not match each other.
    """
    batch = _empty_batch(examples, len(rows), sequence_length, max_segments)
    for place, row in enumerate(rows):
        if row != PADDING_ROW:
            _fill_row(batch, place, examples, plan, row)
    return batch


class PackedLoader(Iterator[Batch]):
    """Serves the packed batches of a whole run, every process its share, from any row on.

    The rows of all epochs follow each other, each epoch with a plan of its own (seeded by (seed, epoch)); a
    batch may span two epochs, and only the last batch of the run is filled up with rows of padding, whose loss
    weights are 0. All state is the number of rows served, over all processes: a run resumes on another
    number of processes, or with another batch size, in the same order of rows.

    Batches are built ahead of time by Grain's threads, by random access, in order. What goes wrong while
    building one is raised by `next`, never taken for the end.

    Attributes:
        total_rows: rows of the run, padding not counted.
        total_steps: batches of the run; the same on every process.
        fill_rate: share of the tokens of these rows that belong to a document, in (0, 1].
        dropped: reason -> int64 indices of the examples left out in every epoch.
    """

    def __init__(
        self,
        examples: Sequence[EncodedExample],
        sequence_length: int,
        global_batch_rows: int,
        seed: int,
        epochs: int,
        max_segments: int,
        process_index: int = 0,
        process_count: int = 1,
        prefetch: int = 2,
    ):
        """Plans all epochs.

        Args:
            examples: the whole data set, the same on every process.
            sequence_length: tokens per row; longer examples are dropped and listed in `dropped`, never cut.
            global_batch_rows: rows of a global batch, a multiple of `process_count`.
            seed: of the order of examples and rows.
            epochs: passes over the data, at least 1.
            max_segments: most documents per row.
            process_index: this process, in [0, process_count). It gets the rows
                [index, index + 1) * global_batch_rows / process_count of each batch.
            process_count: processes that share each batch.
            prefetch: batches built ahead; 0 builds them on demand.

        Raises:
            UserError: a setting out of range, an example with nothing to train, or no example that fits a row.
        """
        _check_settings(global_batch_rows, epochs, process_index, process_count)
        _check_trainable(examples)
        self._examples = examples
        self._sequence_length = sequence_length
        self._global_batch_rows = global_batch_rows
        self._max_segments = max_segments
        self._process_index = process_index
        self._process_count = process_count
        self._prefetch = prefetch
        lengths = np.array([len(example.tokens) for example in examples], dtype=np.int64)
        self._plans = [plan_rows(lengths, sequence_length, (seed, epoch), max_segments) for epoch in range(epochs)]
        # row number of the run at which each epoch starts, and the end
        self._starts = list(itertools.accumulate((plan.num_rows for plan in self._plans), initial=0))
        self.total_rows = self._starts[-1]
        self.total_steps = -(-self.total_rows // global_batch_rows)
        over_long = self._plans[0].dropped
        self.dropped = {f"longer than a row of {sequence_length} tokens": over_long} if len(over_long) else {}
        if self.total_rows == 0:
            raise UserError(
                f"loader: sequence_length is {sequence_length} and none of the {len(examples)} examples fits; raise it"
            )
        placed = sum(int(lengths[plan.example_index].sum()) for plan in self._plans)
        self.fill_rate = placed / (self.total_rows * sequence_length)
        self.restore(0)

    def restore(self, row: int) -> None:
        """Continues as if the first `row` rows of the run had been served.

        Raises:
            UserError: the run has no such row.
        """
        if not 0 <= row <= self.total_rows:
            raise UserError(
                f"loader: row to resume at is {row}, the run has {self.total_rows}; resume with the data and settings "
                "of the run that was interrupted"
            )
        self._row = row
        self._batches = self._batches_from(row)

    def state(self) -> dict[str, int]:
        """{"row": rows served, what `restore` takes; "epoch": the epoch that the next row belongs to}."""
        return {"row": self._row, "epoch": bisect.bisect_right(self._starts, self._row) - 1}

    def __next__(self) -> Batch:
        """The next batch: this process's global_batch_rows / process_count rows, as `pack_rows` describes them."""
        if self._row >= self.total_rows:
            raise StopIteration
        try:
            batch = next(self._batches)
        except Exception as error:
            self.restore(self._row)  # Grain's prefetch has lost its place: a retry must give this batch, not another
            if isinstance(error, StopIteration):
                raise RuntimeError(f"loader: data ended at row {self._row} of {self.total_rows}") from error
            raise
        self._row = min(self._row + self._global_batch_rows, self.total_rows)
        return batch

    def _batches_from(self, row: int) -> grain.DatasetIterator:
        remaining = -(-(self.total_rows - row) // self._global_batch_rows)
        source = _BatchSource(remaining, lambda index: self._local_batch(row + index * self._global_batch_rows))
        # As many threads as batches ahead: each builds one.
        options = grain.ReadOptions(num_threads=self._prefetch, prefetch_buffer_size=self._prefetch)
        return iter(grain.MapDataset.source(source).to_iter_dataset(options))

    def _local_batch(self, first_row: int) -> Batch:
        """This process's part of the global batch that starts at a row of the run."""
        share = self._global_batch_rows // self._process_count
        batch = _empty_batch(self._examples, share, self._sequence_length, self._max_segments)
        start = first_row + self._process_index * share
        for place, row in enumerate(range(start, min(start + share, self.total_rows))):
            epoch = bisect.bisect_right(self._starts, row) - 1
            _fill_row(batch, place, self._examples, self._plans[epoch], row - self._starts[epoch])
        return batch


class _BatchSource(grain.sources.RandomAccessDataSource):
    """A number of batches, each built when it is asked for: what Grain reads."""

    def __init__(self, count: int, build: Callable[[int], Batch]):
        self._count = count
        self._build = build

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        return self._build(index)


def _empty_batch(
    examples: Sequence[EncodedExample], rows: int, sequence_length: int, max_segments: int | None
) -> Batch:
    batch = {name: np.zeros((rows, sequence_length), dtype) for name, dtype in _STANDARD.items()}
    if not examples:
        return batch
    first = examples[0]
    taken = sorted({*first.token_extras, *first.segment_extras} & _STANDARD.keys())
    if taken or first.token_extras.keys() & first.segment_extras.keys():
        raise UserError(
            f"packed batch: extras are {[*first.token_extras, *first.segment_extras]}; use names of their own"
        )
    if first.segment_extras and max_segments is None:
        raise UserError("packed batch: max_segments is None; give it, segment extras are [rows, max_segments]")
    batch |= {name: np.zeros((rows, sequence_length), np.float32) for name in first.token_extras}
    batch |= {name: np.zeros((rows, max_segments), np.float32) for name in first.segment_extras}
    return batch


def _fill_row(batch: Batch, place: int, examples: Sequence[EncodedExample], plan: RowPlan, row: int) -> None:
    """Lays the documents of one row of a plan into row `place` of a batch of zeros."""
    for entry in plan.entries(row).tolist():
        index, offset = int(plan.example_index[entry]), int(plan.offset[entry])
        example, segment = examples[index], int(plan.segment[entry])
        _check_extras(batch, example, index)
        length = len(example.tokens)
        document = (place, slice(offset, offset + length))
        predicting = (place, slice(offset, offset + length - 1))  # all but the last, which has no next token
        batch["tokens"][document] = example.tokens
        batch["targets"][predicting] = example.tokens[1:]
        batch["positions"][document] = np.arange(length)
        batch["segment_ids"][document] = segment
        batch["loss_weights"][predicting] = np.arange(1, length) >= example.prompt_length
        for name, values in example.token_extras.items():
            batch[name][predicting] = values[1:]
        for name, value in example.segment_extras.items():
            batch[name][place, segment - 1] = value


def _check_extras(batch: Mapping[str, np.ndarray], example: EncodedExample, index: int) -> None:
    names = {*example.token_extras, *example.segment_extras}
    if names != batch.keys() - _STANDARD.keys():
        expected = sorted(batch.keys() - _STANDARD.keys())
        raise UserError(f"packed batch: example {index} has extras {sorted(names)}; give {expected} as example 0 has")
    for name, values in example.token_extras.items():
        if values.shape != example.tokens.shape:
            raise UserError(
                f"packed batch: example {index}: {name} has shape {list(values.shape)}; give one value for each of the "
                f"{len(example.tokens)} tokens"
            )


def _check_settings(global_batch_rows: int, epochs: int, process_index: int, process_count: int) -> None:
    if epochs < 1:
        raise UserError(f"loader: epochs is {epochs}; give at least 1")
    if not 0 <= process_index < process_count:
        raise UserError(f"loader: process_index is {process_index}; give one in [0, {process_count})")
    if global_batch_rows < 1 or global_batch_rows % process_count:
        raise UserError(
            f"loader: global_batch_rows is {global_batch_rows}; give a multiple of {process_count} processes"
        )


def _check_trainable(examples: Sequence[EncodedExample]) -> None:
    for index, example in enumerate(examples):
        # nothing predicts a document's first token, so it is never trained
        if example.prompt_length < 0 or max(example.prompt_length, 1) >= len(example.tokens):
            raise UserError(
                f"loader: example {index} has prompt_length {example.prompt_length} of {len(example.tokens)} tokens; "
                "remove it, it has no response to train"
            )
