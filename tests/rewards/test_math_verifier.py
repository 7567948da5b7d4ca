"""Verdicts on mathematical answers, through the pool that training uses."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards import VerifierPool
from vibethinker_jax.rewards.base import get_verifier


def problem(answer, **fields):
    return {"id": "p-1", "verifier": {"kind": "math", "answer": answer, **fields}}


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(workers=1, timeout_s=5.0) as pool:
        yield pool


RIGHT = [
    ("72", "Natalia sold 72 clips.\n#### 72"),
    ("72", r"\boxed{72}"),
    ("72", r"<think>\boxed{7}</think>It is \boxed{72}."),
    ("72", r"\boxed{072}"),
    ("72", r"\boxed{72.0}"),
    ("72", r"\boxed{\frac{144}{2}}"),
    ("72", r"\boxed{x = 72}"),
    ("72", r"\boxed{72\text{ clips}}"),
    ("72", "The answer is 72."),
    ("1000", r"\boxed{1{,}000}"),
    ("1000", r"\boxed{1,000}"),
    (r"1\,234", r"\boxed{1234}"),
    ("-3", r"\boxed{-3}"),
    (70, r"\boxed{70}"),
    ("17", r"\boxed{12+5=17}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"$\frac{1}{2}$.", r"\boxed{\dfrac12}"),
    (r"\boxed{\frac{1}{2}}", r"\boxed{1/2}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    (r"$1331$ and $1728$", r"\boxed{1728, 1331}"),
    (r"\left\lfloor \log_{2}a\right\rfloor +1", r"\boxed{1 + \lfloor \log_2 a \rfloor}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}}"),
    (r"\dfrac97", r"\boxed{\dfrac97}"),  # read as nothing by a parser that is given no box
    ("A", r"\boxed{A}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2004!}}"),  # same text, although no parser should see it
]
WRONG = [
    ("7", r"<think>maybe \boxed{7}"),  # truncated
    ("7", r"<think>\boxed{7}</think>I do not know."),
    ("7", r"<think>\boxed{7}</think>"),
    ("7", r"\boxed{7}<think>hm"),
    ("7", r"\boxed{7} no, \boxed{8}"),
    ("7", r"\boxed{7} or \boxed{8"),
    ("7", r"\boxed{}"),
    ("7", ""),
    ("7", "no number at all"),
    ("72", r"\boxed{72.5}"),
    ("72", r"\boxed{7 2 1}"),
    ("72", r"\boxed{-72}"),
    ("72", "#### 71"),
    ("5", r"\boxed{7=5}"),
    ("5", r"\boxed{2+2=4=5}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"$1331$ and $1728$", r"\boxed{1728}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"),
    ("A", r"\boxed{B}"),
    ("7", "#### " + "7" * 5000),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right_answers_are_right(pool, gold, response):
    verdict = pool.submit(problem(gold), response).result()
    assert (verdict.reward, verdict.correct, verdict.error) == (1.0, True, None), verdict


@pytest.mark.parametrize(("gold", "response"), WRONG, ids=lambda text: text[:40])
def test_wrong_answers_are_wrong(pool, gold, response):
    verdict = pool.submit(problem(gold), response).result()
    assert (verdict.reward, verdict.correct, verdict.error) == (0.0, False, None), verdict


def test_the_extracted_answer_is_reported(pool):
    assert pool.submit(problem("72"), r"so \boxed{\frac{144}{2}}").result().answer == r"\frac{144}{2}"
    assert pool.submit(problem("72"), "the total is 71").result().answer == "71"
    assert pool.submit(problem("72"), "there is nothing to find").result().answer is None


def test_thinking_can_be_required(pool):
    required = problem("72", require_thinking=True)
    assert pool.submit(required, r"\boxed{72}").result().correct is False
    assert pool.submit(required, r"<think>6 * 12</think>\boxed{72}").result().correct is True


# An empty list of parsed golds once made a reversed comparison reward everything; no empty gold may get that far.
@pytest.mark.parametrize("gold", ["", "  ", "$$", "$ $", ".", "{}", None, True, ["7"]])
def test_an_empty_or_untyped_gold_is_refused_at_submission(pool, gold):
    with pytest.raises(UserError, match=r"problem p-1: verifier\.answer is .*; give the gold answer"):
        pool.submit(problem(gold), r"\boxed{7}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "q"}, r"problem q: verifier is None"),
        ({"verifier": {"answer": "7"}}, r"problem: verifier\.kind is None; use one of: .*math"),
        ({"verifier": {"kind": "maths", "answer": "7"}}, r"verifier\.kind is 'maths'"),
        ({"verifier": {"kind": ["math"], "answer": "7"}}, r"verifier\.kind is \['math'\]"),
        ({"verifier": {"kind": "math", "answer": "7", "require_thinkin": True}}, "unknown key require_thinkin"),
        ({"verifier": {"kind": "math", "answer": "7", "require_thinking": "no"}}, "require_thinking is 'no'"),
    ],
)
def test_an_invalid_verifier_is_a_user_error_at_submission(pool, record, message):
    with pytest.raises(UserError, match=message):
        pool.submit(record, "7")


def test_a_response_that_is_no_text_is_a_user_error(pool):
    with pytest.raises(UserError, match="response is a NoneType"):
        pool.submit(problem("7"), None)


@settings(deadline=None)
@given(gold=st.integers(-(10**12), 10**12), guess=st.integers(-(10**12), 10**12))
def test_integers_are_decided_exactly_and_without_a_worker(gold, guess):
    verifier = get_verifier("math", "test")
    for form in (str(guess), f"{guess:,}", f"{guess}.0", f"${guess}$"):
        verdict = verifier.decide({"kind": "math", "answer": str(gold)}, f"so \\boxed{{{form}}}")
        assert verdict.correct == (gold == guess)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="\\boxed{}<>/think#$0123456789.,^!= \n", max_size=80))
def test_deciding_never_raises(response):
    verdict = get_verifier("math", "test").decide({"kind": "math", "answer": "7"}, response)
    assert verdict is None or verdict.error is None


def test_deciding_integers_imports_neither_sympy_nor_jax():
    program = """
import sys
from vibethinker_jax.rewards import verify
problem = {"verifier": {"kind": "math", "answer": "1000"}}
assert verify(problem, "so \\\\boxed{1{,}000}").correct
assert not verify(problem, "so \\\\boxed{1{,}001}").correct
print([name for name in ("sympy", "math_verify", "jax", "numpy") if name in sys.modules])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_gsm8k_solutions_are_right_on_their_gold_and_wrong_on_the_next(shared_dir, pool):
    lines = (shared_dir / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()[:500]
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = [solution.rpartition("#### ")[2] for solution in solutions]
    assert all(v.correct for v in pool.map((problem(g), s) for g, s in zip(golds, solutions, strict=True)))
    shifted = golds[1:] + golds[:1]
    verdicts = pool.map((problem(g), s) for g, s in zip(shifted, solutions, strict=True))
    assert [v.correct for v in verdicts] == [a == b for a, b in zip(golds, shifted, strict=True)]
