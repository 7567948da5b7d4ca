"""Every gold solution of GSM8K is right on its own gold answer, and only by coincidence on another's."""

import json
import random

from vibethinker_jax.rewards.base import get_verifier
from vibethinker_jax.rewards.numbers import number


def test_all_gold_solutions_are_right_and_shuffled_ones_wrong(shared_dir):
    lines = (shared_dir / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = [solution.rpartition("#### ")[2] for solution in solutions]
    verifier = get_verifier("math", "test")
    assert len(golds) == 7473
    for gold, solution in zip(golds, solutions, strict=True):
        spec = {"kind": "math", "answer": gold}
        verifier.check(spec, "gsm8k")
        assert verifier.decide(spec, solution).correct is True, solution
    shuffled = random.Random(0).sample(golds, len(golds))
    for gold, other, solution in zip(golds, shuffled, solutions, strict=True):
        verdict = verifier.decide({"kind": "math", "answer": other}, solution)
        assert verdict.correct is (number(gold) == number(other)), (gold, other)
