"""Row plan: which document goes into which row of packed batches, and where in it.

Computed from lengths alone, before anything is read, with an explicit seed: every host finds the same plan, the
number of rows (and so of steps) is known up front, and a row can be built by random access.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from vibethinker_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class RowPlan:
    """Where every kept document lies. The arrays run in the order in which documents were placed.

    Attributes:
        example_index: int64[kept], which document.
        row: int64[kept], in [0, num_rows).
        offset: int64[kept], position of its first token in the row.
        segment: int64[kept], its place among the documents of the row, from 1 (0 marks padding).
        num_rows: rows in use; none is empty.
        dropped: int64[dropped], documents that are longer than a row, ascending.
    """

    example_index: Int[np.ndarray, "kept"]
    row: Int[np.ndarray, "kept"]
    offset: Int[np.ndarray, "kept"]
    segment: Int[np.ndarray, "kept"]
    num_rows: int
    dropped: Int[np.ndarray, "dropped"]

    def entries(self, row: int) -> Int[np.ndarray, "documents"]:
        """Indices into the arrays above of one row's documents, from left to right."""
        order, starts = self._by_row
        return order[starts[row] : starts[row + 1]]

    @functools.cached_property
    def _by_row(self) -> tuple[Int[np.ndarray, "kept"], Int[np.ndarray, "rows_and_one"]]:
        order = np.lexsort((self.offset, self.row))
        return order, np.searchsorted(self.row[order], np.arange(self.num_rows + 1))


def plan_rows(
    lengths: Sequence[int] | Int[np.ndarray, "documents"],
    sequence_length: int,
    seed: int | Sequence[int] | None = None,
    max_segments: int | None = None,
) -> RowPlan:
    """Packs documents into rows by first fit: each goes into the first row with room for all of it.

    With a seed, documents are placed in a random order and the finished rows are shuffled: first fit fills
    early rows with short documents, which must not all come first in training. Documents are never cut.

    Args:
        lengths: tokens per document, each at least 1.
        sequence_length: tokens per row.
        seed: of the generator (several integers are mixed, e.g. (seed, epoch)). None keeps documents and rows
            in order.
        max_segments: most documents per row; None for no limit.

    Returns:
        The plan. O(n log n): a million documents take seconds.

    Raises:
        UserError: a length, `sequence_length` or `max_segments` below 1.
    """
    lengths = _checked(lengths, sequence_length, max_segments)
    fits = lengths <= sequence_length
    example_index = np.flatnonzero(fits)
    generator = None if seed is None else np.random.default_rng(seed)
    if generator is not None:
        example_index = generator.permutation(example_index)
    placed = lengths[example_index]
    row = _first_fit(placed, sequence_length, max_segments)
    offset, segment = _positions(row, placed)
    num_rows = int(row.max(initial=-1)) + 1
    if generator is not None:
        row = generator.permutation(num_rows)[row]
    return RowPlan(example_index, row, offset, segment, num_rows, dropped=np.flatnonzero(~fits))


def _checked(
    lengths: Sequence[int] | Int[np.ndarray, "documents"], sequence_length: int, max_segments: int | None
) -> Int[np.ndarray, "documents"]:
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        lengths = lengths.astype(np.int64)
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise UserError(f"row plan: lengths are {lengths.dtype}{list(lengths.shape)}; give a list of integers")
    if lengths.min(initial=1) < 1:
        index = int(lengths.argmin())
        raise UserError(f"row plan: lengths[{index}] is {lengths[index]}; remove documents without tokens")
    for name, value in (("sequence_length", sequence_length), ("max_segments", max_segments)):
        if value is not None and value < 1:
            raise UserError(f"row plan: {name} is {value}; give at least 1")
    return lengths.astype(np.int64)


def _first_fit(
    lengths: Int[np.ndarray, "kept"], sequence_length: int, max_segments: int | None
) -> Int[np.ndarray, "kept"]:
    """The first row with room, for each length in turn.

    A complete binary tree over all rows holds the largest free space below each node, so that the leftmost row
    with room is found in one descent. Rows not in use yet are simply empty. Plain lists: a numpy scalar access
    costs several times a list's.
    """
    kept = len(lengths)
    # Of two rows that are at most half full and may take more documents, the later one's would have fitted into
    # the earlier one, so there is at most one such row beside those closed by max_segments.
    most_rows = 2 * int(lengths.sum()) // sequence_length + 1 + (kept // max_segments if max_segments else 0)
    leaves = 1 << max(min(most_rows, kept) - 1, 0).bit_length()
    room = [sequence_length] * (2 * leaves)  # node i has children 2i and 2i + 1; row r is node leaves + r
    open_places = [max_segments if max_segments else kept + 1] * leaves
    rows = []
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        row = node - leaves
        rows.append(row)
        open_places[row] -= 1
        room[node] = room[node] - length if open_places[row] else 0
        while node > 1:
            left_or_right, sibling = room[node], room[node ^ 1]
            most = left_or_right if left_or_right > sibling else sibling
            node //= 2
            if room[node] == most:
                break
            room[node] = most
    return np.array(rows, dtype=np.int64)


def _positions(
    row: Int[np.ndarray, "kept"], lengths: Int[np.ndarray, "kept"]
) -> tuple[Int[np.ndarray, "kept"], Int[np.ndarray, "kept"]]:
    """Offset in its row and place among its row's documents (from 1), for documents in the order of placement."""
    order = np.argsort(row, kind="stable")
    first = np.flatnonzero(np.diff(row[order], prepend=-1))  # where each row's documents begin in that order
    counts = np.diff(first, append=len(row))
    ends = np.cumsum(lengths[order])
    starts = ends - lengths[order]
    offset, segment = np.empty_like(row), np.empty_like(row)
    offset[order] = starts - np.repeat(starts[first], counts)
    segment[order] = np.arange(len(row)) - np.repeat(first, counts) + 1
    return offset, segment
