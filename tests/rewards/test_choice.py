"""Verdicts on multiple choice, and chance for a policy that always answers A on the file whose gold is always A."""

import pathlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vibethinker_jax.data.records import Problem, load_problems
from vibethinker_jax.data.render import render
from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards import verify
from vibethinker_jax.rewards.base import get_verifier

OPTIONS = ["10^-4 eV", "10^-8 eV", "a large increase", "None of the above"]


def problem(answer: str = "B", options: list[str] = OPTIONS, **fields: bool) -> dict:
    return {"id": "p", "verifier": {"kind": "choice", "options": options, "answer": answer, **fields}}


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{B}",
        r"So it is \boxed{\text{B}}.",
        r"\boxed{(B)}",
        r"\boxed{\mathrm{b}}",
        r"\boxed{B. 10^-8 eV}",
        r"\boxed{B) the second}",
        r"\boxed{10^-8 eV}",
        r"\boxed{10^{-3}} is the ratio, so \boxed{B}",
        r"\boxed{B} and again \boxed{B}. Answer: B",
        r"<think>\boxed{A}</think>\boxed{B}",
        "Answer: B",
        "**Answer:** B",
        "**Answer: (B)**",
        "The correct answer is B.",
        "The answer is option B because it is small.",
        "The answer is: **10^-8 EV**",
        "Not A. The answer is A? No.\nAnswer: B",
        "Long thoughts.\n\nB",
        "Long thoughts.\n\n**(B)**",
        "Long thoughts.\nB. 10^-8 eV",
        "Long thoughts.\n10^-8  eV.",
        "Answer: b",
    ],
)
def test_a_letter_or_the_text_of_the_gold_option_is_right(response: str) -> None:
    verdict = verify(problem(), response)
    assert (verdict.reward, verdict.correct, verdict.answer, verdict.error) == (1.0, True, "B", None), verdict


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n",
        "I do not know.",
        "<think>Answer: B",
        "<think>Answer: B</think>",
        "<think>Answer: B</think>I do not know.",
        r"\boxed{A}",
        r"\boxed{E}",
        r"\boxed{}",
        r"\boxed{B",
        r"\boxed{A, B}",
        r"\boxed{A and B}",
        r"\boxed{B or C}",
        r"\boxed{AB}",
        r"\boxed{B/D}",
        r"\boxed{A}\boxed{B}",
        r"\boxed{A}\boxed{B}\boxed{C}\boxed{D}",
        r"\boxed{B} Answer: C",
        r"\boxed{B. 10^-4 eV}",
        r"\boxed{B} or rather \boxed{42}",
        r"\boxed{not B}",
        "Answer: B or C",
        "Answer: A, B",
        "Answer: B. 10^-4 eV",
        "Answer: B) and C)",
        "Answer: not B",
        "The answer is A\nAnswer: C",
        "A B C D",
        "B is tempting, but I cannot tell.",
        r"\boxed{B}" * 60,
    ],
)
def test_other_several_and_contradictory_answers_are_wrong(response: str) -> None:
    verdict = verify(problem(), response)
    assert (verdict.reward, verdict.correct, verdict.error) == (0.0, False, None), verdict


def test_an_article_is_no_letter() -> None:
    assert verify(problem("A"), "The answer is A large increase").correct is False
    assert verify(problem("C"), "The answer is A large increase").correct is True
    assert verify(problem("A"), "The answer is A small decrease").correct is False


def test_options_that_are_lower_case_letters_are_told_from_labels() -> None:
    options = ["c", "a", "d", "b"]
    assert verify(problem("A", options), r"\boxed{A}").correct is True
    assert verify(problem("A", options), r"\boxed{c}").correct is True
    assert verify(problem("A", options), r"\boxed{a}").correct is False


def test_case_matters_where_it_tells_options_apart() -> None:
    options = ["q/L^2", "q/l^2"]
    assert verify(problem("B", options), r"\boxed{q/l^2}").correct is True
    assert verify(problem("B", options), r"\boxed{q/L^2}").correct is False
    assert verify(problem("B", ["Yes", "no"]), "Answer: NO").correct is True


def test_thinking_may_be_required() -> None:
    assert verify(problem(require_thinking=True), "Answer: B").correct is False
    assert verify(problem(require_thinking=True), "<think>hm</think>Answer: B").correct is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "E"}, "verifier.answer is 'E'; write the letter of an option: ABCD"),
        ({"answer": "AB"}, "verifier.answer is 'AB'"),
        ({"answer": ""}, "verifier.answer is ''"),
        ({"answer": 1}, "verifier.answer is 1"),
        ({"options": ["x"]}, "list 2 to 26"),
        ({"options": ["x", ""]}, "list 2 to 26"),
        ({"options": "AB"}, "list 2 to 26"),
        ({"options": ["x", "x "]}, "make the options distinct"),
        ({"option": []}, "unknown key option"),
    ],
)
def test_entries_without_a_verdict_are_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^problem p: .*{message}"):
        verify({"id": "p", "verifier": problem()["verifier"] | change}, "Answer: B")


def test_always_a_scores_by_chance_on_the_file_whose_gold_is_always_a(shared_dir: pathlib.Path) -> None:
    problems = load_problems(shared_dir / "data" / "stem" / "gpqa_diamond.parquet", benchmark="gpqa-diamond")
    assert len(problems) == 198
    letters = dict.fromkeys("ABCD", 0)
    samples = 4
    for one in problems:
        for sample in range(samples):
            rendered = render(one, sample)
            for letter in letters:
                letters[letter] += verify(rendered, rf"Hm. \boxed{{{letter}}}").correct is True
    total = 198 * samples
    assert sum(letters.values()) == total
    # Standard deviation of a letter's share: sqrt(1/4 * 3/4 / 792) = 1.5 points.
    assert all(abs(count / total - 0.25) < 0.05 for count in letters.values()), letters
    # The first sample, which `load_problems` gives, by itself: 198 draws, standard deviation 3.1 points.
    assert abs(sum(verify(one, "Answer: A").correct is True for one in problems) / 198 - 0.25) < 0.1


def test_the_text_of_each_gpqa_option_is_read_as_that_option(shared_dir: pathlib.Path) -> None:
    for one in load_problems(shared_dir / "data" / "stem" / "gpqa_diamond.parquet", benchmark="gpqa-diamond"):
        for letter, option in zip("ABCD", one.verifier["options"], strict=True):
            right = letter == one.verifier["answer"]
            assert verify(one, rf"\boxed{{{option}}}").correct is right, (one.id, option)
            assert verify(one, f"Answer: {letter}. {option}").correct is right, (one.id, option)


pieces = st.sampled_from(
    ["A", "B", "(C)", "\\boxed{", "}", "Answer:", " ", "\n", "10^-8 eV", ",", "</think>", "**", "or"]
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=12).map("".join))
def test_any_text_has_one_verdict_and_at_most_one_letter_is_right(response: str) -> None:
    verifier = get_verifier("choice", "test")
    verdicts = [verifier.decide(problem(letter)["verifier"], response) for letter in "ABCD"]
    assert all(verdict.correct in (True, False) for verdict in verdicts)
    assert sum(verdict.correct for verdict in verdicts) <= 1


@pytest.mark.parametrize("unit", ["(", "\\boxed{", "A, ", " ", "*", "$", "Answer: ", "\\text{", "A and ", ",,"])
def test_long_responses_take_no_time(unit: str) -> None:
    # Worth a limit in seconds only because a quadratic reading of 200,000 characters takes minutes.
    start = time.process_time()
    get_verifier("choice", "test").decide(problem()["verifier"], unit * (200_000 // len(unit)))
    assert time.process_time() - start < 5


def test_a_problem_object_is_verified_like_its_record() -> None:
    given_problem = Problem("p", "stem", ({"role": "user", "content": "Which?"},), problem()["verifier"])
    assert verify(given_problem, "Answer: B").correct is True
