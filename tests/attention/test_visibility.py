import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.reference import documents, hard_rows
from vibethinker_jax.attention.block_map import block_map, transposed_block_map
from vibethinker_jax.attention.visibility import key_codes, pad_keys, pad_queries, query_bounds, visible
from vibethinker_jax.attention.zigzag import zigzag_order


def codes(segments, positions, stride=None):
    segments, positions = jnp.asarray(segments), jnp.asarray(positions)
    stride = stride or segments.shape[1]
    return query_bounds(segments, positions, stride), key_codes(segments, positions, stride)


def stacked(rows):
    return tuple(np.stack(x) for x in zip(*rows, strict=True))


def test_a_token_sees_the_tokens_of_its_document_up_to_itself():
    segments, positions = np.array([[1, 1, 2, 2, 0]]), np.array([[0, 1, 0, 1, 0]])
    expected = np.zeros((5, 5), bool)
    expected[0, 0] = expected[1, 0] = expected[1, 1] = expected[2, 2] = expected[3, 2] = expected[3, 3] = True
    np.testing.assert_array_equal(visible(*codes(segments, positions))[0], expected)
    order = np.array([3, 0, 4, 2, 1])
    permuted = visible(*codes(segments[:, order], positions[:, order]))[0]
    np.testing.assert_array_equal(permuted, expected[np.ix_(order, order)])


def test_documents_with_the_same_id_see_each_other_as_positions_allow():
    segments, positions = (x[None] for x in documents(2, 1, 1, ids=(1, 2, 1), seq=5))
    expected = np.zeros((5, 5), bool)
    for query, keys in enumerate([(0, 3), (0, 1, 3), (2,), (0, 3), ()]):
        expected[query, list(keys)] = True
    np.testing.assert_array_equal(visible(*codes(segments, positions))[0], expected)


def test_codes_fit_int32_for_the_largest_row_there_may_be():
    length = 65_536
    segments = np.array([[32_767, 32_767, 32_766, 0]])
    positions = np.array([[length - 1, 0, length - 1, length - 1]])
    expected = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(visible(*codes(segments, positions, length))[0], expected)


def test_appended_padding_sees_and_is_seen_by_nobody():
    queries, keys = codes(*stacked([documents(5, seq=5)]))
    padded = visible(pad_queries(queries, 4), pad_keys(keys, 3))
    assert padded.shape == (1, 8, 6)
    np.testing.assert_array_equal(padded[0, :5, :5], np.tril(np.ones((5, 5), bool)))
    assert padded.sum() == 15


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (3, 16)])
def test_the_block_map_visits_every_visible_pair_and_no_block_without_one(shards, sizes):
    """In these rows documents and chunks are contiguous, so ranges decide exactly, except where an id comes back."""
    rows = hard_rows(48)
    order = zigzag_order(48, shards)
    queries, keys = codes(*(x[:, order] for x in stacked(rows)))
    pairs = np.asarray(visible(queries, keys)).reshape(len(rows), 48 // sizes[0], sizes[0], 48 // sizes[1], sizes[1])
    for function, axes in ((block_map, (0, 1, 2)), (transposed_block_map, (0, 2, 1))):
        some, every = (x.transpose(axes) for x in (pairs.any((2, 4)), pairs.all((2, 4))))
        found = jax.jit(function, static_argnums=(2, 3))(queries, keys, *sizes)
        columns, kinds, counts = map(np.asarray, found)
        for row, line in np.ndindex(counts.shape):
            count = counts[row, line]
            active = columns[row, line, :count]
            assert sorted(set(active)) == list(active)
            assert set(np.flatnonzero(some[row, line])) <= set(active)
            np.testing.assert_array_equal(kinds[row, line, :count] == 2, every[row, line, active])
            assert (kinds[row, line, :count] > 0).all()
            assert (kinds[row, line, count:] == 0).all()
            assert (columns[row, line, count:] == (active[-1] if count else 0)).all()
        if shards == 1:
            np.testing.assert_array_equal(counts[:3], some[:3].sum(-1))
