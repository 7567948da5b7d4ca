"""Expressions that exhaust a computer algebra system are wrong before anything reads them, and quickly."""

import contextlib
import time

import pytest

from tests.rewards.test_numbers import HAZARDS
from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import get_verifier
from vibethinker_jax.rewards.exact.rational import TooLarge, rational
from vibethinker_jax.rewards.exact.refusal import refusal

TEMPLATES = [
    ("a^{{b^{{a}}}}", "{n}^{{{m}^{{{n}}}}}"),
    ("tower", "{n}^{{{n}^{{{n}^{{{m}}}}}}}"),
    ("flat tower", "{n}^{n}^{m}^{n}"),
    ("large factorial", "{n}000000!"),
    ("factorial of a power", "(10^{{{m}}})!"),
    ("long sum", r"\sum_{{k=1}}^{{{n}0000000}} k"),
    ("long sum from far below", r"\sum_{{k=-{n}0000000}}^{{0}} k"),
    ("long product", r"\prod_{{k=1}}^{{10^{{{m}}}}} k"),
    ("high power of a sum", "(x+{m})^{{{n}00000}}"),
    ("large binomial", r"\binom{{{n}0000000}}{{{m}000000}}"),
    ("deep brackets", "{brackets}{n}{closing}"),
    ("deep fractions", "{fractions}"),
]


def variants(template):
    for n, m in [(11, 8), (12, 9), (23, 10), (47, 11), (99, 12)]:
        depth = 300 * m
        yield template.format(
            n=n, m=m, brackets="(" * depth, closing=")" * depth, fractions=r"\frac{1}{1+" * 60 + str(n) + "}" * 60
        )


@pytest.mark.parametrize("template", [template for _, template in TEMPLATES], ids=[name for name, _ in TEMPLATES])
def test_attacks_on_the_parser_are_refused_without_a_worker(template):
    verifier = get_verifier("math", "test")
    started = time.process_time()
    for attack in variants(template):
        for response in (rf"\boxed{{{attack}}}", f"The answer is ${attack}$"):
            verdict = verifier.decide({"kind": "math", "answer": r"\frac{1}{3}"}, response)
            assert verdict is not None, attack[:80]
            assert verdict.correct is False
            assert "refused unread" in verdict.detail or "empty, overlong" in verdict.detail
    assert time.process_time() - started < 1.0  # ten refusals; one parse takes longer


@pytest.mark.parametrize("attack", HAZARDS, ids=lambda text: text[:30])
def test_an_attack_is_right_only_as_the_same_text(attack):
    if len(attack) > 1000:
        with pytest.raises(UserError, match="longer than 1000 characters"):
            get_verifier("math", "test").check({"kind": "math", "answer": attack}, "p")
        return
    verifier, spec = get_verifier("math", "test"), {"kind": "math", "answer": attack}
    verifier.check(spec, "p")
    assert verifier.decide(spec, rf"\boxed{{ {attack}}}").correct is True
    assert verifier.decide(spec, r"\boxed{\frac{7}{3}}").correct is False


@pytest.mark.parametrize(
    "text", ["7^{7^{7^{7}}}", "3^{99999}", "2^{9999}" + r"\cdot 2^{9999}" * 50, "99999!", "1.5e9999" * 30]
)
def test_exact_arithmetic_has_a_budget(text):
    started = time.process_time()
    with contextlib.suppress(TooLarge):
        assert rational(text) is None
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("gold", ["3+", r"\frac{1}{}", "(1, 2", "{1}}", r"\sqrt{}", "=5", r"x \le", "(", r"7\frac"])
def test_a_gold_that_cannot_be_read_is_refused_at_load(gold):
    with pytest.raises(UserError, match=r"problem 3: verifier\.answer is .*; give the gold answer"):
        get_verifier("math", "test").check({"kind": "math", "answer": gold}, "problem 3")


@pytest.mark.parametrize(
    "gold",
    ["7", "(1, 2]", "]1, 2[", r"\{x \mid x > 2\}", "Yes", r"\emptyset", r"\frac12", "28\\%", r"\infty", "-3", r"\$5"],
)
def test_ordinary_golds_load(gold):
    get_verifier("math", "test").check({"kind": "math", "answer": gold}, "p")
    assert refusal(gold) is None
