"""The policy table is what the verifier does."""

import pytest

from vibethinker_jax.rewards.base import get_verifier
from vibethinker_jax.rewards.exact.policy import POLICY, policy_table


def judged(gold, answer):
    return get_verifier("math", "test").judge({"kind": "math", "answer": gold}, rf"\boxed{{{answer}}}")


def examples():
    for rule in POLICY:
        for right, pairs in ((True, rule.equal), (False, rule.unequal)):
            for gold, answer in pairs:
                yield pytest.param(gold, answer, right, id=f"{rule.topic}: {gold} / {answer}")
                if rule.symmetric:
                    yield pytest.param(answer, gold, right, id=f"{rule.topic}: {answer} / {gold}")


@pytest.mark.parametrize(("gold", "answer", "right"), examples())
def test_the_examples_of_the_policy_hold(gold, answer, right):
    verdict = judged(gold, answer)
    assert (verdict.correct, verdict.error) == (right, None), verdict


def test_every_rule_has_examples_of_both_kinds_and_a_row_in_the_table():
    table = policy_table().splitlines()
    assert len(table) == len(POLICY) + 2
    for rule, row in zip(POLICY, table[2:], strict=True):
        assert rule.equal
        assert rule.unequal
        assert row.startswith(f"| {rule.topic} | ")
        assert row.replace(r"\|", "").count("|") == 5


# Where the rules name an asymmetry, the other direction has the other verdict.
@pytest.mark.parametrize(("gold", "answer"), [("17", "16+1"), ("28", r"28\%")])
def test_the_asymmetric_rules_are_asymmetric(gold, answer):
    assert judged(gold, answer).correct is False
    assert judged(answer, gold).correct is True


def test_the_detail_says_why_an_answer_is_wrong():
    assert "arithmetic left to the reader" in judged("17", "16+1").detail
    assert "a set is no tuple" in judged(r"\{1,2\}", "(1,2)").detail
    assert "a false equation" in judged("5", "7=5").detail
    assert "another unit" in judged(r"5\text{ cm}", r"5\text{ kg}").detail
    assert "1 values instead of 2" in judged(r"\{1,2\}", r"\{1\}").detail


def test_a_gold_that_the_parser_cannot_read_is_an_error_and_no_zero():
    verdict = judged(r"\curlyeqprec 7^\star", "8")
    assert verdict.correct is None
    assert "cannot read" in verdict.error
