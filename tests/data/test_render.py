"""Options permuted by seed: the gold moves with its text, the prompt says the same as the verifier."""

import collections
import hashlib
import json
import pathlib
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vibethinker_jax
from vibethinker_jax.data.records import Example, Problem, load_problems
from vibethinker_jax.data.render import render
from vibethinker_jax.errors import UserError

OPTIONS = ("red", "green (dark)", "blue", "[x] 2^3")
QUESTION = "Which?\n\nA. red\nB. green (dark)\nC. blue\nD. [x] 2^3\n\nAnswer with a letter."


def problem(question: str = QUESTION, options: tuple[str, ...] = OPTIONS, answer: str = "B", id: str = "p") -> Problem:
    messages = ({"role": "system", "content": "A. red"}, {"role": "user", "content": question})
    return Problem(id, "stem", messages, {"kind": "choice", "options": list(options), "answer": answer})


def gold(one: Problem) -> str:
    return one.verifier["options"]["ABCDEFGH".index(one.verifier["answer"])]


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.text(max_size=5))
def test_the_gold_moves_with_its_text_and_the_prompt_lists_the_new_order(sample: int, seed: int, id: str) -> None:
    before = problem(id=id)
    after = render(before, sample, seed)
    order = after.verifier["options"]
    assert sorted(order) == sorted(OPTIONS)
    assert gold(after) == "green (dark)"
    listed = "".join(f"{letter}. {option}\n" for letter, option in zip("ABCD", order, strict=True))
    assert after.prompt[1]["content"] == f"Which?\n\n{listed}\nAnswer with a letter."
    assert after.prompt[0] == before.prompt[0]
    assert before == problem(id=id)


def test_the_order_does_not_depend_on_how_the_file_lists_the_options() -> None:
    other = problem(
        "Which?\n\nA. blue\nB. red\nC. [x] 2^3\nD. green (dark)\n\nAnswer with a letter.",
        ("blue", "red", "[x] 2^3", "green (dark)"),
        "D",
    )
    for sample in range(20):
        assert render(other, sample) == render(problem(), sample) == render(render(problem(), sample + 1), sample)


def test_every_order_comes_up_about_as_often_as_any_other() -> None:
    counted = collections.Counter(
        tuple(render(problem(options=("x", "y", "z"), question="Q?", id=f"p{index}"), sample).verifier["options"])
        for index in range(30)
        for sample in range(20)
    )
    assert len(counted) == 6
    assert all(60 <= count <= 140 for count in counted.values()), counted  # 100 expected, standard deviation 9


def test_sample_seed_and_id_each_change_the_order() -> None:
    def orders(ones: list[Problem]) -> int:
        return len({tuple(one.verifier["options"]) for one in ones})

    assert orders([render(problem(), sample) for sample in range(30)]) > 10
    assert orders([render(problem(), 0, seed) for seed in range(30)]) > 10
    assert orders([render(problem(id=f"p{index}")) for index in range(30)]) > 10


def test_the_order_is_that_of_every_other_process() -> None:
    code = (
        "import vibethinker_jax as vt, sys\n"
        "from vibethinker_jax.data.records import Problem\n"
        "verifier = {'kind': 'choice', 'options': ['red', 'green', 'blue', 'pink'], 'answer': 'A'}\n"
        "p = Problem('p', 'stem', ({'role': 'user', 'content': 'Q?'},), verifier)\n"
        "print([vt.render(p, sample).verifier['options'] for sample in range(3)])\n"
        "assert 'jax' not in sys.modules\n"
    )

    def by_hash(sample: int) -> list[str]:
        def digest(option: str) -> bytes:
            return hashlib.sha256(f"options\n0\np\n{sample}\n{option}".encode()).digest()

        return sorted(["red", "green", "blue", "pink"], key=digest)

    root = str(pathlib.Path(vibethinker_jax.__file__).parent.parent)
    for hash_seed in ("1", "2"):
        environment = {"PYTHONPATH": root, "PYTHONHASHSEED": hash_seed, "PATH": ""}
        printed = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert printed.stdout.strip() == str([by_hash(sample) for sample in range(3)])


@pytest.mark.parametrize(
    "question",
    [
        "Which?\n(A) red\n(B) green (dark)\n(C) blue\n(D) [x] 2^3",
        "Which?\nA) red\nB) green (dark)\nC) blue\nD) [x] 2^3",
        "Which? A: red B: green (dark) C: blue D: [x] 2^3",
        "Which?\n\n**A.** red\n\n**B.** green (dark)\n\n**C.** blue\n\n**D.** [x] 2^3",
        "Which?\n- A. red\n- B. green (dark)\n- C. blue\n- D. [x] 2^3\n",
    ],
)
def test_labels_of_common_forms_keep_their_form(question: str) -> None:
    rendered = render(problem(question), 1)
    order = rendered.verifier["options"]
    assert order != list(OPTIONS)
    expected = question
    for index, option in enumerate(OPTIONS):
        expected = expected.replace(option, f"<{index}>")
    for index, option in enumerate(order):
        expected = expected.replace(f"<{index}>", option)
    assert rendered.prompt[1]["content"] == expected


def test_a_question_without_its_options_gets_them_once() -> None:
    once = render(problem("Which?"), 3)
    assert once.prompt[1]["content"].startswith("Which?\n\nA. ")
    again = render(once, 4)
    assert again.prompt[1]["content"].count("red") == 1
    assert again == render(problem("Which?"), 4)


def test_a_question_that_lists_other_options_is_refused() -> None:
    with pytest.raises(UserError, match=r"problem p: the prompt lists options that are not verifier\.options"):
        render(problem(QUESTION.replace("blue", "cyan")))


def test_options_about_the_others_stay_last_or_keep_all_in_place() -> None:
    above = problem("Q?", ("red", "All of the above", "blue"), "A")
    for sample in range(10):
        rendered = render(above, sample)
        assert rendered.verifier["options"][2] == "All of the above"
        assert gold(rendered) == "red"
    letters = problem("Q?", ("red", "blue", "Both A and B"), "C")
    assert all(render(letters, s).verifier == letters.verifier for s in range(10))


def test_other_problems_and_examples_are_returned_unchanged() -> None:
    maths = Problem("p", "math", ({"role": "user", "content": "A. 1\nB. 2"},), {"kind": "math", "answer": "1"})
    assert render(maths, 5) is maths
    assert vibethinker_jax.render(maths) is maths
    example = Example(**vars(problem()), trace_id="t", response="Answer: B")
    assert render(example, 5) is example


def test_gpqa_is_loaded_as_its_sample_0_with_options_as_the_file_has_them(shared_dir: pathlib.Path) -> None:
    import pyarrow.parquet

    path = shared_dir / "data" / "stem" / "gpqa_diamond.parquet"
    problems = load_problems(path, benchmark="gpqa-diamond")
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(problems) == len(rows) == 198
    for one, row in zip(problems, rows, strict=True):
        question = row["prompt"][0]["content"]
        first = re.search(r"^A\. (.*?)\nB\. ", question, re.DOTALL | re.MULTILINE)[1]
        assert gold(one) == first.strip()  # the gold is A in every row
        assert sorted(one.prompt[0]["content"].split()) == sorted(question.split())
        assert render(one) == one
    assert len({one.verifier["answer"] for one in problems}) == 4


ROW = {
    "prompt": [{"role": "user", "content": "Which?\n\nA. red\nB. blue\n\nReason."}],
    "reward_model": {"ground_truth": "A"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": {"ground_truth": "C"}}, r"reward_model.ground_truth is 'C'; write the letter .*AB"),
        ({"reward_model": {}}, r"reward_model.ground_truth is None"),
        ({"prompt": [{"role": "user", "content": "Which?"}]}, r"prompt\[-1\].content is 'Which\?'; list at least two"),
        ({"prompt": [{"role": "user", "content": "Q\nA. red\nB. red"}]}, r"make the options distinct"),
    ],
)
def test_rows_without_options_or_a_gold_letter_are_refused(tmp_path: pathlib.Path, change: dict, message: str) -> None:
    path = tmp_path / "gpqa.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change))
    with pytest.raises(UserError, match=rf"gpqa\.jsonl:2: .*{message}"):
        load_problems(path, benchmark="gpqa-diamond")
