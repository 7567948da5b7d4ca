"""Whatever a response says, the string layers return a verdict, quickly, and the same one both ways."""

import time
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vibethinker_jax.rewards.base import get_verifier
from vibethinker_jax.rewards.exact.compare import Comparison
from vibethinker_jax.rewards.exact.rational import TooLarge, rational
from vibethinker_jax.rewards.exact.read import read
from vibethinker_jax.rewards.exact.text import normalise
from vibethinker_jax.rewards.extract import final_answer

PIECES = [
    "1", "2", "12", "345", "0.5", ",", ";", " ", "+", "-", "=", "<", r"\le ", "^", "!", "%", r"\%", "(", ")", "[", "]",
    "{", "}", r"\{", r"\}", r"\frac", r"\sqrt", r"\pm ", r"\pi ", r"\infty", r"\cup ", r"\in ", r"\mid ", r"\text{ cm}",
    r"\text{ and }", " or ", "x", "n", "AB", "k", r"^\circ", ":", "|", r"\mathbb{Z}", r"\begin{pmatrix}", "&", r"\\",
    r"\end{pmatrix}", r"\ldots", "/", r"\cdot ", "where ", "$", r"\log ", "e", "i", "_", r"\boxed{", "####",
    "answer is ",
]  # fmt: skip
fuzz = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
numbers = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.builds(lambda a, b: rf"\frac{{{a}}}{{{b}}}", st.integers(-99, 99), st.integers(1, 99)),
    st.decimals(-100, 100, places=2).map(str),
)
values = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda items: f"({', '.join(items)})"),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: rf"\{{{', '.join(items)}\}}"),
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(fuzz, fuzz)
def test_comparison_takes_any_text_in_bounded_time(gold, answer):
    started = time.process_time()
    assert Comparison().texts(normalise(gold), normalise(answer)) in (True, False, None)
    assert time.process_time() - started < 1.0


@settings(max_examples=300, deadline=None)
@given(fuzz)
def test_deciding_takes_any_response(response):
    verdict = get_verifier("math", "test").decide({"kind": "math", "answer": r"\{1, 2\}"}, response)
    assert verdict is None or (verdict.error is None and verdict.correct in (True, False))
    answer = final_answer(response)
    assert answer is None or answer in response


@settings(max_examples=200, deadline=None)
@given(fuzz)
def test_spelling_is_settled_once(text):
    assume(r"\\" not in text)  # a line break of a matrix may hide a command from the first reading
    assert normalise(normalise(text)) == normalise(text)
    assert read(normalise(text))


@settings(max_examples=300, deadline=None)
@given(values, values)
def test_values_compare_the_same_both_ways(one, other):
    assert Comparison().texts(one, other) is Comparison().texts(other, one)
    assert Comparison().texts(one, one) is True


@settings(deadline=None)
@given(st.fractions(), st.fractions())
def test_fractions_compare_as_their_values(one, other):
    texts = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    assert Comparison().texts(*texts) is (one == other)


@settings(deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_sets_have_no_order_and_tuples_do(items, rng):
    mixed = rng.sample(items, len(items))
    assume(mixed != items)
    first, second = (", ".join(map(str, order)) for order in (items, mixed))
    assert Comparison().texts(rf"\{{{first}\}}", rf"\{{{second}\}}") is True
    assert Comparison().texts(f"({first})", f"({second})") is False


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/^!(). e", max_size=40))
def test_exact_arithmetic_agrees_with_python(text):
    assume(not any(mark in text for mark in ("!", "e", "^", "**", "//")))
    try:
        result = rational(text)
    except TooLarge:
        return
    if result is not None and "*" not in text and " " not in text:
        exact = "".join(f"Fraction('{part}')" if part[0].isdigit() or part[0] == "." else part for part in _parts(text))
        assert eval(exact, {"Fraction": Fraction}) == result.value


def _parts(text):
    number = ""
    for char in text:
        if char.isdigit() or char == ".":
            number += char
            continue
        if number:
            yield number
            number = ""
        yield char
    if number:
        yield number
