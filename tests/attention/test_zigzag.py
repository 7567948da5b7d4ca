import numpy as np
import pytest

from vibethinker_jax.attention.zigzag import inverse_order, zigzag_order
from vibethinker_jax.errors import UserError


def test_each_shard_holds_a_chunk_and_its_mirror_image():
    np.testing.assert_array_equal(zigzag_order(12, 3), [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    np.testing.assert_array_equal(zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])


def test_one_shard_keeps_the_order():
    np.testing.assert_array_equal(zigzag_order(7, 1), np.arange(7))


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_have_equal_causal_work_and_the_inverse_restores_the_row(shards):
    order = zigzag_order(48, shards)
    work = (order + 1).reshape(shards, -1).sum(1)
    assert len(set(work)) == 1
    np.testing.assert_array_equal(order[inverse_order(order)], np.arange(48))
    np.testing.assert_array_equal(inverse_order(order)[order], np.arange(48))


def test_a_row_that_cannot_be_cut_is_refused():
    with pytest.raises(UserError, match="12 tokens cannot be cut into 8 equal chunks"):
        zigzag_order(12, 4)
    with pytest.raises(UserError, match=r"mesh\.context is 0"):
        zigzag_order(12, 0)
