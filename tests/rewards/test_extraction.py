import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibethinker_jax.rewards.extract import final_answer, last_box, last_hashes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{ \{x \mid x > 2 \} }", r"\{x \mid x > 2 \}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace needs no partner
        (r"\boxed{x = \boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7", "7"),
        (r"the answer is $\boxed 7$.", "7"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{}", ""),
        (r"\boxed{3} and then \boxed{4", ""),  # truncated: the earlier box was not the final answer
        (r"\boxed", ""),
        (r"no box {7}", None),
        ("", None),
    ],
)
def test_the_last_box_is_found_with_its_nested_braces(text, expected):
    assert last_box(text) == expected


def test_an_overlong_box_is_no_answer():
    assert last_box("\\boxed{" + "1" * 1000 + "}") == "1" * 1000
    assert last_box("\\boxed{" + "1" * 1001 + "}") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6 x 12 = 72\n#### 72", "72"),
        ("#### 71\n#### 72", "72"),
        ("#### 72\n\nSo she sold 72 clips.", "72"),  # a number counts anywhere
        ("#### $1,000\nDone.", "$1,000"),
        ("#### x + 1\n", "x + 1"),  # the last line counts whatever it is
        ("#### Conclusion\nThe answer is 72.", None),  # a heading
        ("#### 1. First step\nThe answer is 72.", None),
        ("##### 72", None),
        ("the answer is #### 72", None),
        ("####", None),
    ],
)
def test_hashes_are_an_answer_and_not_a_heading(text, expected):
    assert last_hashes(text) == expected


def test_a_box_goes_before_hashes():
    assert final_answer("\\boxed{1}\n#### 2") == "1"
    assert final_answer("text\n#### 2") == "2"
    assert final_answer("the answer is 2") == "2"
    assert final_answer("we count two of them") is None


@given(st.lists(st.sampled_from(["\\boxed", "{", "}", "\\{", "\\", "#### ", "\n", "7", " ", "x"])).map("".join))
def test_extraction_takes_any_text(text):
    answer = final_answer(text)
    assert answer is None or answer in text


@given(st.text(alphabet="abc123+-^_ ", max_size=50), st.text(max_size=50))
def test_what_was_boxed_last_is_extracted(answer, before):
    assert last_box(f"{before}\\boxed{{{answer}}}") == answer.strip()
