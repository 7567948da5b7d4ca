from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.rewards.exact.refusal import approximate, refusal
from vibethinker_jax.rewards.numbers import number


@pytest.mark.parametrize(
    "text",
    [
        "1234", "+1234", "01234", "1234.", "1234.0", "1234.000", "1,234", "1{,}234", r"1\,234", r"1,\!234", "1 234",
        r"1\ 234", "1~234", "$1234$", "$1,234.00$", r"\$1234", "$1234", r"\(1234\)", r"\[ 1234 \]", "$$1234$$.",
        " 1234 \n", "$ 1234 $.",
    ],
)  # fmt: skip
def test_every_form_of_an_integer_is_the_integer(text):
    assert number(text) == 1234


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-7", -7),
        ("\u22127", -7),
        ("-0", 0),
        ("007", 7),
        (".5", Fraction(1, 2)),
        ("0.10", Fraction(1, 10)),
        ("72.5", 72.5),
    ],
)
def test_signs_zeros_and_decimals_are_exact(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "-", "1,23", "1,2345", "12,34", "1.2.3", "1 2", "1e5", "28\\%", "7/2", "2^3", "x", "72 clips", "٣",
     "1,234 567", "0x10", "1_000", "--7", "\\frac{1}{2}", "(7)", "\\text{7}", "9" * 2000],
)  # fmt: skip
def test_everything_else_is_left_to_the_parser(text):
    assert number(text) is None


@given(st.integers(-(10**30), 10**30))
def test_written_integers_are_read_back(value):
    assert number(str(value)) == value
    assert number(f"{value:,}") == value
    assert number(f"${value:,}.00$".replace(",", "{,}")) == value


@given(st.text(alphabet="0123456789.,-+${}\\!~ ", max_size=30))
def test_number_never_raises_and_never_takes_two_values_for_one(text):
    value = number(text)
    if value is not None:
        # dropping everything but digits, sign and point must leave the same value: nothing else carries meaning
        kept = "".join(c for c in text.strip() if c in "0123456789.+-")
        assert Fraction(kept.rstrip(".") or "0") == value


# Every second one also goes to a worker unrefused, in test_verifier_pool.py.
HAZARDS = [
    "10^{10^{10}}", "9^9^9^9", "9^{9^{9^9}}", "9**9**9", "10000000!", "(10^6)!", r"\sum_{k=1}^{10^8} k", "((5!)!)!",
    "(x+1)^{100000}", "(x+1)^100000", r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
    r"\frac{1}{20060!}", "(" * 3000 + "1" + ")" * 3000, "{(20000)}!", "1" * 1001, "2^{-10^{9}}",
    r"2^{9 \cdot 9^{9}}", r"\left(10\right)^{\left(10^{10}\right)}",
]  # fmt: skip


@pytest.mark.parametrize("text", HAZARDS, ids=lambda text: text[:30])
def test_expressions_that_exhaust_a_parser_are_refused(text):
    assert refusal(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "72", r"2^{2025}", "2^{2^{10}}", "x^{y^{z}}", "e^{-x^{2}}", "2^{2^{n}}", "10!", "n!", "(n+1)!", "5!!",
        "90^{\\circ}", r"\frac{-1+\sqrt{17}}{2}", r"\left(0, \infty\right)", r"\sum_{k=1}^{n} k^2", "a \\neq b",
        "x^{-1}", "f^{-1}(x)", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        "1!=2", "((((x))))", "x^", "^", "!", "{", ")!", "2^{1/0}",
    ],
)  # fmt: skip
def test_ordinary_answers_are_not_refused(text):
    assert refusal(text) is None


@given(st.text(alphabet="0123456789^*!(){}+-/. x\\=,", max_size=60))
def test_reading_an_expression_never_raises(text):
    refusal(text)
    approximate(text)


def test_arithmetic_is_approximated_and_symbols_are_not():
    assert approximate(r"2 \cdot (3 + 4)^{2} - 1/2") == 97.5
    assert approximate("-2^2") == -4
    assert approximate("9^{9^{9}}") == float("inf")
    assert approximate("x + 1") is None
    assert approximate("1/0") is None
    assert approximate("2 3") is None
    assert approximate("__import__('os')") is None
