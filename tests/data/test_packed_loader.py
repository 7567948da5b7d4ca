"""Packed batches against numbers worked out by hand, and a loader that any number of processes may resume."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vibethinker_jax.data.chat import EncodedExample, encode_example
from vibethinker_jax.data.loader import PADDING_ROW, PackedLoader, pack_rows
from vibethinker_jax.data.records import load_problems
from vibethinker_jax.data.row_plan import plan_rows
from vibethinker_jax.data.tokenizer import Tokenizer
from vibethinker_jax.errors import UserError


def make_examples(lengths: list[int]) -> list[EncodedExample]:
    """Example i has tokens 100 i + 1, 100 i + 2, ... and a prompt of a third of them."""
    return [
        EncodedExample(np.arange(1, n + 1, dtype=np.int32) + 100 * i, prompt_length=n // 3)
        for i, n in enumerate(lengths)
    ]


def assert_batches_equal(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        assert got[name].dtype == want[name].dtype


def concatenate(parts: list[dict]) -> dict:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_a_packed_batch_worked_out_by_hand() -> None:
    examples = [
        EncodedExample(
            np.array([11, 12, 13, 14], np.int32),
            prompt_length=2,
            token_extras={"rollout_log_probs": np.array([9, 8, -0.5, -0.25], np.float32)},
            segment_extras={"advantages": 1.5},
        ),
        EncodedExample(
            np.array([21, 22, 23, 24, 25, 26, 27], np.int32),
            prompt_length=6,
            token_extras={"rollout_log_probs": np.array([9, 9, 9, 9, 9, 9, -2], np.float32)},
            segment_extras={"advantages": -0.5},
        ),
        EncodedExample(
            np.array([31, 32, 33], np.int32),
            prompt_length=1,
            token_extras={"rollout_log_probs": np.array([7, -1, -3], np.float32)},
            segment_extras={"advantages": 2},
        ),
    ]
    plan = plan_rows([4, 7, 3], sequence_length=8)  # 4 and then 3 in row 0, 7 in row 1
    batch = pack_rows(examples, plan, rows=[1, PADDING_ROW, 0], sequence_length=8, max_segments=3)
    none = [0] * 8
    expected = {
        "tokens": [[21, 22, 23, 24, 25, 26, 27, 0], none, [11, 12, 13, 14, 31, 32, 33, 0]],
        "targets": [[22, 23, 24, 25, 26, 27, 0, 0], none, [12, 13, 14, 0, 32, 33, 0, 0]],
        "positions": [[0, 1, 2, 3, 4, 5, 6, 0], none, [0, 1, 2, 3, 0, 1, 2, 0]],
        "segment_ids": [[1] * 7 + [0], none, [1, 1, 1, 1, 2, 2, 2, 0]],
        # the first trained token is tokens[prompt_length], predicted one position earlier
        "loss_weights": [[0, 0, 0, 0, 0, 1, 0, 0], none, [0, 1, 1, 0, 1, 1, 0, 0]],
        "rollout_log_probs": [[9, 9, 9, 9, 9, -2, 0, 0], none, [8, -0.5, -0.25, 0, -1, -3, 0, 0]],
        "advantages": [[-0.5, 0, 0], [0, 0, 0], [1.5, 2, 0]],
    }
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], np.array(values), err_msg=name)
        integer = name in ("tokens", "targets", "positions", "segment_ids")
        assert batch[name].dtype == (np.int32 if integer else np.float32)


def test_documents_without_a_prompt_or_of_one_token_pack() -> None:
    examples = [EncodedExample(np.array([5, 6], np.int32), 0), EncodedExample(np.array([7], np.int32), 0)]
    batch = pack_rows(examples, plan_rows([2, 1], 4), [0], 4)
    assert batch["tokens"].tolist() == [[5, 6, 7, 0]]
    assert batch["targets"].tolist() == [[6, 0, 0, 0]]
    assert batch["loss_weights"].tolist() == [[1, 0, 0, 0]]  # nothing predicts a document's first token
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 0]]


def test_extras_that_do_not_match_are_refused() -> None:
    def example(**extras: dict) -> EncodedExample:
        return EncodedExample(np.array([1, 2, 3], np.int32), 1, **extras)

    plan = plan_rows([3, 3], 6)
    values = np.zeros(3, np.float32)
    for examples, message in [
        ([example(token_extras={"a": values}), example()], r"example 1 has extras \[\]; give \['a'\]"),
        ([example(), example(token_extras={"a": values})], r"example 1 has extras \['a'\]; give \[\]"),
        ([example(token_extras={"a": values[:2]})] * 2, r"example 0: a has shape \[2\]; .* each of the 3 tokens"),
        ([example(token_extras={"targets": values})] * 2, "use names of their own"),
        ([example(token_extras={"a": values}, segment_extras={"a": 1})] * 2, "use names of their own"),
        ([example(segment_extras={"a": 1})] * 2, "max_segments is None"),
    ]:
        with pytest.raises(UserError, match=message):
            pack_rows(examples, plan, [0], 6)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(0, 1000))
@settings(deadline=None)
def test_every_document_can_be_read_back_from_the_packed_batch(lengths: list[int], seed: int) -> None:
    examples = make_examples(lengths)
    plan = plan_rows(lengths, 12, seed)
    batch = pack_rows(examples, plan, range(plan.num_rows), 12)
    found = {}
    for row in range(plan.num_rows):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            tokens = batch["tokens"][row][here]
            n = len(tokens)
            assert batch["targets"][row][here].tolist() == [*tokens[1:].tolist(), 0]
            assert batch["positions"][row][here].tolist() == list(range(n))
            # tokens[max(n // 3, 1):] are trained
            assert batch["loss_weights"][row][here].sum() == n - max(n // 3, 1)
            found[int(tokens[0]) // 100] = tokens.tolist()
    assert found == {i: example.tokens.tolist() for i, example in enumerate(examples)}
    padding = batch["segment_ids"] == 0
    assert all(not values[padding].any() for values in batch.values())


LENGTHS = [3, 5, 2, 7, 4, 9, 6, 8, 3, 3, 5, 1 + 1, 10, 4, 7]  # 9 and 10 do not fit into rows of 8
SETTINGS = {"sequence_length": 8, "seed": 3, "epochs": 3, "max_segments": 4}


def make_loader(process_index: int = 0, process_count: int = 1, global_batch_rows: int = 4, **changes) -> PackedLoader:
    return PackedLoader(
        make_examples(LENGTHS),
        **{**SETTINGS, **changes},
        global_batch_rows=global_batch_rows,
        process_index=process_index,
        process_count=process_count,
    )


def rows_of(batches: list[dict]) -> list[list[int]]:
    """The rows that are not padding, in order."""
    return [row.tolist() for batch in batches for row in batch["tokens"] if row.any()]


def test_every_epoch_serves_every_example_that_fits_once_in_an_order_of_its_own() -> None:
    loader = make_loader(global_batch_rows=1)
    batches = list(loader)
    assert len(batches) == loader.total_steps == loader.total_rows
    # The share of tokens that are not padding, over all rows served.
    assert loader.fill_rate == pytest.approx(np.mean([batch["segment_ids"] > 0 for batch in batches]))
    assert 0.5 < loader.fill_rate < 1
    assert {reason: indices.tolist() for reason, indices in loader.dropped.items()} == {
        "longer than a row of 8 tokens": [5, 12]
    }
    orders, done = [], 0
    for _ in range(3):
        first_tokens = []
        while len(first_tokens) < 13:
            batch = batches[done]
            first_tokens += batch["tokens"][(batch["segment_ids"] > 0) & (batch["positions"] == 0)].tolist()
            done += 1
        orders.append([token // 100 for token in first_tokens])
    assert done == len(batches)
    assert all(sorted(order) == [i for i in range(15) if i not in (5, 12)] for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_epochs_follow_each_other_and_only_the_last_batch_is_padded() -> None:
    loader = make_loader()
    assert loader.total_rows % 4 != 0  # or this test shows nothing
    batches = list(loader)
    assert len(batches) == loader.total_steps == -(-loader.total_rows // 4)
    assert all((batch["segment_ids"] > 0).any(axis=1).all() for batch in batches[:-1])
    used = loader.total_rows % 4
    last = batches[-1]
    assert (last["segment_ids"][:used] > 0).any(axis=1).all()
    assert all(values.shape == (4, 8) and not values[used:].any() for values in last.values())
    assert rows_of(batches) == rows_of(list(make_loader(global_batch_rows=1)))


@pytest.mark.parametrize("process_count", [2, 4])
def test_the_processes_batches_together_are_the_batches_of_one(process_count: int) -> None:
    whole = list(make_loader())
    parts = [list(make_loader(index, process_count)) for index in range(process_count)]
    assert {len(part) for part in parts} == {len(whole)}
    for step, batch in enumerate(whole):
        assert_batches_equal(concatenate([part[step] for part in parts]), batch)


def test_a_run_resumes_at_any_row_on_any_number_of_processes() -> None:
    total = make_loader().total_rows
    in_order = rows_of(list(make_loader(global_batch_rows=1)))
    assert len(in_order) == total
    for row in range(total + 1):
        for process_count in (1, 2, 4):
            loaders = [make_loader(index, process_count) for index in range(process_count)]
            for loader in loaders:
                loader.restore(row)
            steps = list(zip(*loaders, strict=True))
            assert rows_of([concatenate(list(parts)) for parts in steps]) == in_order[row:]
            assert [loader.state()["row"] for loader in loaders] == [total] * process_count


def test_the_state_after_a_batch_continues_with_the_next_one_elsewhere() -> None:
    whole = list(make_loader())
    loader = make_loader()
    ends = [make_loader(epochs=epochs).total_rows for epochs in (1, 2, 3)]
    for step in range(len(whole) - 1):
        next(loader)
        state = loader.state()
        assert state == {"row": 4 * (step + 1), "epoch": sum(4 * (step + 1) >= end for end in ends)}
        two = [make_loader(index, 2) for index in range(2)]
        for half in two:
            half.restore(state["row"])
        assert_batches_equal(concatenate([next(half) for half in two]), whole[step + 1])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_building_ahead_changes_nothing(prefetch: int) -> None:
    for got, want in zip(make_loader(prefetch=prefetch), make_loader(), strict=True):
        assert_batches_equal(got, want)


def test_the_seed_decides_the_order() -> None:
    assert rows_of(list(make_loader())) == rows_of(list(make_loader()))
    assert rows_of(list(make_loader(seed=4))) != rows_of(list(make_loader()))


class Unreadable(list):
    """A data set that cannot be read at one index, for a number of times."""

    def __init__(self, examples: list, error: Exception):
        super().__init__(examples)
        self.error, self.failures = error, 0

    def __getitem__(self, index: int) -> EncodedExample:
        if index == 3 and self.failures > 0:
            self.failures -= 1
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk"), IndexError("shard"), StopIteration("shard"), KeyError("shard")])
def test_an_error_in_the_data_is_raised_and_a_retry_loses_no_batch(error: Exception, prefetch: int) -> None:
    examples = Unreadable(make_examples(LENGTHS), error)
    loader = PackedLoader(examples, **SETTINGS, global_batch_rows=2, prefetch=prefetch)
    examples.failures = 1
    batches, errors = [], []
    for _ in range(loader.total_steps + 1):
        try:
            batches.append(next(loader))
        except Exception as raised:
            errors.append(raised)
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    assert [type(raised) for raised in errors] == [expected]
    assert rows_of(batches) == rows_of(list(make_loader(global_batch_rows=2)))
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_rows": 3, "process_count": 2}, "global_batch_rows is 3; give a multiple of 2"),
        ({"global_batch_rows": 0}, "global_batch_rows is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"process_index": 2, "process_count": 2}, r"process_index is 2; give one in \[0, 2\)"),
        ({"sequence_length": 1}, "sequence_length is 1 and none of the 15 examples fits"),
        ({"max_segments": 0}, "max_segments is 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_loader(**changes)


@pytest.mark.parametrize(("length", "prompt_length"), [(2, 2), (2, 3), (1, 0), (2, -1)])
def test_an_example_with_nothing_to_train_is_refused(length: int, prompt_length: int) -> None:
    examples = [*make_examples([3]), EncodedExample(np.ones(length, np.int32), prompt_length)]
    with pytest.raises(UserError, match=f"example 1 has prompt_length {prompt_length} of {length} tokens"):
        PackedLoader(examples, **SETTINGS, global_batch_rows=1)


@pytest.mark.parametrize("row", [-1, 1000])
def test_a_row_that_the_run_does_not_have_cannot_be_resumed_at(row: int) -> None:
    with pytest.raises(UserError, match=f"row to resume at is {row}"):
        make_loader().restore(row)


def test_real_problems_pack_and_train_exactly_their_responses(qwen: Tokenizer, shared_dir: pathlib.Path) -> None:
    problems = load_problems(shared_dir / "data" / "gsm8k" / "test_first500.jsonl")[:64]
    examples = [encode_example(qwen, p.prompt, p.meta["solution"]) for p in problems]
    loader = PackedLoader(examples, sequence_length=512, global_batch_rows=4, seed=0, epochs=1, max_segments=16)
    assert loader.dropped == {}
    trained = {}
    for batch in loader:
        for row in range(4):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                here = batch["segment_ids"][row] == segment
                question = qwen.decode(batch["tokens"][row][here])
                learnt = batch["targets"][row][here & (batch["loss_weights"][row] == 1)]
                trained[question] = qwen.decode(learnt, skip_special_tokens=False)
    assert len(trained) == 64
    for problem in problems:
        (text,) = [text for question, text in trained.items() if problem.prompt[0]["content"] in question]
        assert text == problem.meta["solution"] + "<|im_end|>"
