"""From verdicts to packed micro-batches, checked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from vibethinker_jax.errors import UserError
from vibethinker_jax.training.mgpo_batch import AdvantageConfig, PackingConfig, advantages_of, micro_batches
from vibethinker_jax.training.trajectories import Group, Sample, read_groups, write_groups

PLAIN = AdvantageConfig(gamma=1.0, mask_truncated=False, long2short=0.0, normalise_by="shaped_std")
PACKING = PackingConfig(sequence_length=8, micro_batch_rows=2, max_segments=3)


def sample(tokens, reward, finish_reason="stop", error=None, log_probs=None):
    correct = None if error else bool(reward)
    log_probs = [-0.5 * i for i in range(len(tokens))] if log_probs is None else log_probs
    return Sample(tuple(tokens), tuple(log_probs), "", finish_reason, math.nan if error else reward, correct, error)


# Group a: one of two correct (p = 1/2, w = 1, A = +-1). Group b: all wrong. Group c: one verdict left, so dropped.
GROUPS = [
    Group("a", (50, 51), (sample([1, 2, 9], 1.0), sample([3, 9], 0.0))),
    Group("b", (60,), (sample([4], 0.0), sample([5, 6], 0.0, "length"))),
    Group("c", (70,), (sample([7], 1.0), sample([8], 0.0, error="worker died"))),
]


def test_advantages_and_weights_by_hand():
    result = advantages_of(GROUPS, PLAIN)
    np.testing.assert_allclose(result.advantages, [[1, -1], [0, 0], [0, 0]], atol=1e-5)
    np.testing.assert_array_equal(result.sample_weights, [[0.5, 0.5], [0.5, 0.5], [0, 0]])
    assert result.num_kept == 2
    assert result.metrics.summary()["samples/without_verdict"] == pytest.approx(1 / 6)


def test_packing_by_hand():
    [batches] = micro_batches(GROUPS, advantages_of(GROUPS, PLAIN), PACKING, updates=1)
    # Kept documents in order: 5, 4, 2 and 3 tokens; first fit into rows of 8: [5, 2], [4, 3].
    [batch] = batches
    assert batch["num_groups"] == 2
    np.testing.assert_array_equal(batch["tokens"], [[50, 51, 1, 2, 9, 60, 4, 0], [50, 51, 3, 9, 60, 5, 6, 0]])
    np.testing.assert_array_equal(batch["targets"], [[51, 1, 2, 9, 0, 4, 0, 0], [51, 3, 9, 0, 5, 6, 0, 0]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1, 1, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 2, 2, 2, 0]])
    np.testing.assert_array_equal(batch["loss_weights"], [[0, 1, 1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 1, 1, 0, 0]])
    # The log-probability of token t + 1 sits at t.
    np.testing.assert_allclose(
        batch["rollout_log_probs"], [[0, 0, -0.5, -1, 0, 0, 0, 0], [0, 0, -0.5, 0, 0, -0.5, 0, 0]]
    )
    np.testing.assert_allclose(batch["advantages"], [[1, 0, 0], [-1, 0, 0]], atol=1e-5)
    np.testing.assert_array_equal(batch["sequence_weights"], [[0.5, 0.5, 0], [0.5, 0.5, 0]])


def test_groups_without_signal_may_skip_the_update_but_still_count():
    [[batch]] = micro_batches(GROUPS, advantages_of(GROUPS, PLAIN), PACKING, updates=1, only_with_signal=True)
    assert batch["num_groups"] == 2
    assert batch["segment_ids"].max() == 1
    assert batch["loss_weights"].sum() == 5


def test_updates_share_the_groups_and_each_counts_its_own():
    updates = micro_batches(GROUPS, advantages_of(GROUPS, PLAIN), PACKING, updates=2)
    assert [[float(batch["num_groups"]) for batch in batches] for batches in updates] == [[1.0], [1.0]]
    assert [batches[0]["tokens"][0, 0] for batches in updates] == [50, 60]
    with pytest.raises(UserError, match="updates_per_batch is 4, but a step has only 3 groups"):
        micro_batches(GROUPS, advantages_of(GROUPS, PLAIN), PACKING, updates=4)


def test_the_last_micro_batch_is_filled_and_every_process_gets_its_rows():
    groups = GROUPS * 3
    advantages = advantages_of(groups, PLAIN)
    [whole] = micro_batches(groups, advantages, PACKING, updates=1)
    assert len(whole) == 3
    halves = [
        micro_batches(groups, advantages, PackingConfig(8, 2, 3, share=(index, 2)), updates=1)[0] for index in range(2)
    ]
    for batch, first, second in zip(whole, *halves, strict=True):
        for name in batch:
            if name != "num_groups":
                np.testing.assert_array_equal(batch[name], np.concatenate([first[name], second[name]]))
    assert sum(float(batch["num_groups"]) for batch in whole) == 6
    with pytest.raises(UserError, match="micro_batch_rows is 3"):
        PackingConfig(8, 3, 3, share=(0, 2))


def test_nothing_left_gives_a_batch_of_padding():
    groups = [GROUPS[2]]
    [[batch]] = micro_batches(groups, advantages_of(groups, PLAIN), PACKING, updates=1)
    assert batch["num_groups"] == 0
    assert not batch["segment_ids"].any()
    assert {"rollout_log_probs", "advantages", "sequence_weights"} <= batch.keys()


def test_a_response_longer_than_a_row_is_named():
    groups = [Group("long", (1, 2), (sample(range(3, 11), 1.0), sample([3], 0.0)))]
    with pytest.raises(UserError, match=r"problem long sample 0 has 10 tokens .*sequence_length is 8"):
        micro_batches(groups, advantages_of(groups, PLAIN), PACKING, updates=1)


def test_truncated_responses_are_wrong_and_untrained_when_masked():
    groups = [Group("t", (1,), (sample([2], 1.0), sample([3], 1.0, "length")))]
    masked = advantages_of(groups, AdvantageConfig(1.0, True, 0.0, "shaped_std"))
    np.testing.assert_allclose(masked.advantages, [[1, -1]], atol=1e-5)
    np.testing.assert_array_equal(masked.sample_weights, [[0.5, 0]])


def test_long2short_prefers_the_shorter_of_two_correct_ones():
    groups = [Group("s", (1,), (sample([2, 9], 1.0), sample([2, 3, 4, 9], 1.0)))]
    # p = 1, w = exp(-gamma log 2) = 1/2; shifts +-0.2, std 0.2: A = +-1/2.
    result = advantages_of(groups, AdvantageConfig(1.0, False, 0.2, "shaped_std"))
    np.testing.assert_allclose(result.advantages, [[0.5, -0.5]], atol=1e-4)


def test_groups_of_different_sizes_are_refused():
    with pytest.raises(UserError, match=r"groups hold \[1, 2\] samples"):
        advantages_of([GROUPS[0], Group("x", (1,), (sample([2], 1.0),))], PLAIN)


def test_stored_groups_come_back_bit_for_bit_and_know_their_settings(tmp_path):
    odd = sample([1, 2], 0.25, log_probs=[float(np.float32(-0.1)), float("-inf")])
    separators = dataclasses.replace(odd, text="line\u2028separator\u0085and\nnewline")
    groups = [*GROUPS, Group("d", (1,), (odd, separators))]
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    assert read_groups(path, "x") is None
    write_groups(path, "x", groups)
    back = read_groups(path, "x")
    assert back[0] == groups[0]
    assert back[2].samples[1].error == "worker died"
    assert back[3].samples[1].text == separators.text
    assert math.isnan(back[2].samples[1].reward)
    assert back[3].samples[0].log_probs[0] == float(np.float32(-0.1))
    assert not math.isfinite(back[3].samples[0].log_probs[1]), "dropped by the loss from both sides"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with pytest.raises(UserError, match=r"step_000001\.jsonl: these rollouts come from other settings"):
        read_groups(path, "y")
