import json

import pytest

from tests.evaluation.fake_engine import FakeEngine
from tests.evaluation.test_evaluate import PARAMS, make_problem
from vibethinker_jax.errors import UserError
from vibethinker_jax.evaluation import compare, evaluate
from vibethinker_jax.evaluation.samples import read_samples
from vibethinker_jax.rewards import VerifierPool

PROBLEMS = [make_problem(number) for number in range(10, 22)]


@pytest.fixture(scope="module")
def pool():
    with VerifierPool() as pool:
        yield pool


def run(pool, output, engine, **changes):
    settings = {"problems": PROBLEMS, "samples": 4, "params": PARAMS, "seed": 0} | changes
    return evaluate(engine, pool=pool, output=output, **settings)


def test_a_better_run_differs_beyond_the_interval(pool, tmp_path):
    first = run(pool, tmp_path / "a", FakeEngine(share_right=0.2), checkpoint="sft")
    second = run(pool, tmp_path / "b", FakeEngine(share_right=0.9), checkpoint="rl", samples=8)
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert comparison.scores == (first.figure.value, second.figure.value)
    assert comparison.score_difference.value == pytest.approx(second.figure.value - first.figure.value)
    assert comparison.score_difference.low > 0
    assert comparison.token_difference.problems == 12
    assert comparison.differences == (("checkpoint", "sft", "rl"), ("samples", 4, 8))
    table = str(comparison)
    assert "differs beyond the interval" in table
    assert "'sft' -> 'rl'" in table
    json.dumps(comparison.to_dict(), allow_nan=False)
    backwards = compare(tmp_path / "b", tmp_path / "a")
    assert backwards.score_difference.value == pytest.approx(-comparison.score_difference.value)


def test_a_run_does_not_differ_from_itself(pool, tmp_path):
    run(pool, tmp_path, FakeEngine())
    comparison = compare(tmp_path, tmp_path)
    difference = comparison.score_difference
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert comparison.differences == ()
    assert "no difference beyond the interval" in str(comparison)


def test_the_same_samples_in_another_order_compare_alike(pool, tmp_path):
    run(pool, tmp_path / "a", FakeEngine(share_right=0.4))
    run(pool, tmp_path / "b", FakeEngine(share_right=0.6))
    before = compare(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "a" / "samples.jsonl"
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True))))
    assert compare(tmp_path / "a", tmp_path / "b") == before


def test_other_problems_are_refused(pool, tmp_path):
    run(pool, tmp_path / "a", FakeEngine())
    run(pool, tmp_path / "b", FakeEngine(), problems=PROBLEMS[2:])
    with pytest.raises(UserError, match="2 only in the first, 0 only in the second"):
        compare(tmp_path / "a", tmp_path / "b")


def test_an_unfinished_or_absent_run_is_refused(pool, tmp_path):
    run(pool, tmp_path / "a", FakeEngine())
    path = tmp_path / "a" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    records, sound = read_samples(path)
    assert len(records) == 47
    assert sound < path.stat().st_size
    with pytest.raises(UserError, match="holds 47 of 48 samples"):
        compare(tmp_path / "a", tmp_path / "a")
    with pytest.raises(UserError, match="holds no evaluation"):
        compare(tmp_path / "nothing", tmp_path / "a")
