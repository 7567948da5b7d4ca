"""Records: what loads, what is refused, and that the refusal names file, line and field."""

import copy
import json
import pathlib
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from vibethinker_jax.data.records import (
    Problem,
    example_from_dict,
    load_examples,
    load_problems,
    problem_from_dict,
)
from vibethinker_jax.data.render import render
from vibethinker_jax.errors import UserError

VERIFIERS = {
    "math": {"kind": "math", "answer": r"\frac{1}{2}"},
    "stdin": {
        "kind": "code",
        "tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "", "stdout": ""}],
        "language": "cpp",
        "time_limit_s": 1.5,
        "memory_mb": 256,
    },
    "call": {
        "kind": "code",
        "tests": [{"arguments": [1, [2]], "expected": None}],
        "entry_point": "solve",
        "language": "python",
        "time_limit_s": 2,
        "memory_mb": 512,
    },
    "choice": {"kind": "choice", "options": ["red", "green", "blue"], "answer": "C"},
    "instructions": {
        "kind": "instructions",
        "instruction_ids": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
        "kwargs": [{}, {"num_bullets": 3}],
    },
    "rubric": {
        "kind": "rubric",
        "criteria": [{"criterion": "polite", "points": 5}, {"criterion": "rude", "points": -2.5}],
    },
    "procedural": {"kind": "procedural", "dataset": "gcd", "entry": {"question": "gcd(4, 6)?", "answer": "2"}},
}


def record(verifier: str = "math", **changes: object) -> dict:
    base = {
        "id": "p1",
        "domain": "math",
        "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "1/4 + 1/4 = ?"}],
        "verifier": copy.deepcopy(VERIFIERS[verifier]),
    }
    return {**base, **changes}


def write_lines(path: pathlib.Path, records: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_kind_loads_and_survives_a_round_trip(verifier: str) -> None:
    problem = problem_from_dict(record(verifier, meta={"level": 3}), "memory")
    assert problem.verifier == VERIFIERS[verifier]
    assert problem.prompt == ({"role": "system", "content": ""}, {"role": "user", "content": "1/4 + 1/4 = ?"})
    assert problem_from_dict(json.loads(json.dumps(problem.to_dict())), "memory") == problem


def test_meta_is_empty_where_a_record_has_none_and_thinking_can_be_required_of_any_kind() -> None:
    wanting = record()
    wanting["verifier"]["require_thinking"] = True
    problem = problem_from_dict(wanting, "memory")
    assert problem.meta == {}
    assert problem.verifier["require_thinking"] is True


# verifier, path of the field, its bad value, what the message must say about the field
BAD_VALUES = [
    ("math", ("id",), "", "id is ''"),
    ("math", ("id",), 7, "id is 7"),
    ("math", ("domain",), "maths", "domain is 'maths'; use one of math, code, stem, instruct, chat"),
    ("math", ("domain",), ["math"], "domain is ['math']"),
    ("math", ("meta",), [], "meta is []"),
    ("math", ("colour",), 1, "colour is not a known field"),
    ("math", ("prompt",), "1+1?", "prompt is '1+1?'"),
    ("math", ("prompt",), [], "prompt is []"),
    ("math", ("prompt", 0, "role"), "robot", "prompt[0].role is 'robot'"),
    ("math", ("prompt", 1, "role"), "assistant", "prompt[-1].role is 'assistant'"),
    ("math", ("prompt", 1, "content"), " ", "prompt[-1].content is ' '"),
    ("math", ("prompt", 1, "content"), [{"type": "text"}], "prompt[1].content is [{'type': 'text'}]"),
    ("math", ("prompt", 1, "content"), "a\ud83d", "prompt[1].content is '\\ud83d'"),
    ("math", ("prompt", 1, "name"), "x", "prompt[1].name is not a known field"),
    ("math", ("verifier",), "math", "verifier is 'math'"),
    ("math", ("verifier", "kind"), "maths", "verifier.kind is 'maths'"),
    ("math", ("verifier", "kind"), ["math"], "verifier.kind is ['math']"),
    ("math", ("verifier", "answer"), "", "verifier.answer is ''"),
    ("math", ("verifier", "answer"), " \n", "verifier.answer is ' \\n'"),
    ("math", ("verifier", "answer"), 12, "verifier.answer is 12"),
    ("math", ("verifier", "answer"), r"\frac{1}{2", "balance its braces"),
    ("math", ("verifier", "answer"), "}1{", "balance its braces"),
    ("math", ("verifier", "tolerance"), 1, "verifier.tolerance is not a known field"),
    ("math", ("verifier", "require_thinking"), "yes", "verifier.require_thinking is 'yes'"),
    ("stdin", ("verifier", "tests"), [], "verifier.tests is []"),
    ("stdin", ("verifier", "tests", 1, "stdin"), 4, "verifier.tests[1].stdin is 4"),
    ("stdin", ("verifier", "tests", 1), {"stdin": ""}, "verifier.tests[1].stdout is missing"),
    ("stdin", ("verifier", "tests", 1), {"arguments": [], "expected": 1}, "use one form of test"),
    ("stdin", ("verifier", "entry_point"), "f", "verifier.entry_point is 'f'"),
    ("stdin", ("verifier", "time_limit_s"), 0, "verifier.time_limit_s is 0"),
    ("stdin", ("verifier", "time_limit_s"), True, "verifier.time_limit_s is True"),
    ("stdin", ("verifier", "memory_mb"), float("inf"), "verifier.memory_mb is inf"),
    ("call", ("verifier", "tests", 0, "arguments"), {"x": 1}, "verifier.tests[0].arguments is {'x': 1}"),
    ("choice", ("verifier", "options"), ["red"], "verifier.options is ['red']"),
    ("choice", ("verifier", "options"), ["red", "red ", "x"], "make the options distinct"),
    ("choice", ("verifier", "answer"), "D", "verifier.answer is 'D'; write the letter of an option, one of A, B, C"),
    ("choice", ("verifier", "answer"), "AB", "verifier.answer is 'AB'"),
    ("instructions", ("verifier", "kwargs"), [{}], "one object for each of the 2 instruction_ids"),
    ("instructions", ("verifier", "instruction_ids", 1), "", "verifier.instruction_ids[1] is ''"),
    ("rubric", ("verifier", "criteria", 0, "points"), "5", "verifier.criteria[0].points is '5'"),
    ("rubric", ("verifier", "criteria", 0, "points"), -1, "give at least one criterion points above 0"),
    ("procedural", ("verifier", "entry"), {}, "verifier.entry is {}"),
]


@pytest.mark.parametrize(("verifier", "field", "value", "message"), BAD_VALUES)
def test_a_bad_value_is_refused_by_file_line_and_field(
    tmp_path: pathlib.Path, verifier: str, field: tuple, value: object, message: str
) -> None:
    bad = record(verifier)
    place = bad
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    with pytest.raises(UserError) as direct:
        problem_from_dict(bad, "set.jsonl:9")
    assert str(direct.value).startswith("set.jsonl:9: ")
    assert message in str(direct.value)
    if value != float("inf"):  # JSON has none
        path = write_lines(tmp_path / "set.jsonl", [record(id="good"), bad])
        with pytest.raises(UserError) as loaded:
            load_problems(path)
        assert str(loaded.value) == str(direct.value).replace("set.jsonl:9", f"{path}:2")


@pytest.mark.parametrize("field", ["id", "domain", "prompt", "verifier"])
def test_a_missing_field_is_named_even_in_the_first_line(tmp_path: pathlib.Path, field: str) -> None:
    bad = record()
    del bad[field]
    path = write_lines(tmp_path / "set.jsonl", [bad])
    with pytest.raises(UserError, match=f"set.jsonl:1: {field} is missing"):
        load_problems(path)


@pytest.mark.parametrize(
    ("verifier", "field"), [("math", "kind"), ("math", "answer"), ("call", "entry_point"), ("stdin", "language")]
)
def test_a_missing_field_of_a_verifier_is_named(verifier: str, field: str) -> None:
    bad = record(verifier)
    del bad["verifier"][field]
    with pytest.raises(UserError, match=rf"x:1: verifier\.{field} is missing"):
        problem_from_dict(bad, "x:1")


def test_lines_are_counted_from_one_with_blank_lines_and_separators_inside_text(tmp_path: pathlib.Path) -> None:
    first = json.dumps(record(id="line\u2028separator\x85"), ensure_ascii=False)
    path = tmp_path / "set.jsonl"
    path.write_text("\ufeff" + first + "\n\n  \n" + json.dumps(record(id="")) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"set\.jsonl:4: id is ''"):
        load_problems(path)
    path.write_text("\ufeff" + first, encoding="utf-8")
    assert [problem.id for problem in load_problems(path)] == ["line\u2028separator\x85"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "caf\xe9"}', r":2: byte 11 is 0xe9, not UTF-8"),
        (b'{"id": ', r":2: not JSON: Expecting value at column 7"),
        (b"[1]", r":2: the line is a list; write a JSON object"),
        (b'{"id": NaN}', r":2: a value is NaN, which is not JSON"),
    ],
)
def test_a_line_that_is_not_json_is_named(tmp_path: pathlib.Path, line: bytes, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(json.dumps(record()).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match=message):
        load_problems(path)


def test_duplicate_ids_are_refused_with_both_lines(tmp_path: pathlib.Path) -> None:
    path = write_lines(tmp_path / "set.jsonl", [record(id="a"), record(id="b"), record(id="a")])
    with pytest.raises(UserError, match=r"set\.jsonl:3: id is 'a'; make it unique, line 1 has it too"):
        load_problems(path)


def test_an_empty_an_absent_and_an_unknown_file_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "set.txt").write_text("{}")
    for name, message in [
        ("empty.jsonl", "holds no records"),
        ("absent.jsonl", "no such file"),
        ("set.txt", r"suffix is '\.txt'; use one of \.jsonl, \.parquet, \.csv"),
    ]:
        with pytest.raises(UserError, match=message):
            load_problems(tmp_path / name)


def test_examples_need_a_response_and_a_unique_pair_of_ids(tmp_path: pathlib.Path) -> None:
    traces = [record(trace_id="t0", response="It is 1/2."), record(trace_id="t1", response=" spaces stay ")]
    examples = load_examples(write_lines(tmp_path / "sft.jsonl", traces))
    assert [(e.id, e.trace_id, e.response) for e in examples] == [
        ("p1", "t0", "It is 1/2."),
        ("p1", "t1", " spaces stay "),
    ]
    assert isinstance(examples[0], Problem)
    assert example_from_dict(examples[0].to_dict(), "memory") == examples[0]
    with pytest.raises(UserError, match=r"sft\.jsonl:3: \(id, trace_id\) is \('p1', 't0'\); make it unique, line 1"):
        load_examples(write_lines(tmp_path / "sft.jsonl", [*traces, traces[0]]))
    for field in ("trace_id", "response"):
        with pytest.raises(UserError, match=f"sft.jsonl:1: {field} is ''"):
            load_examples(write_lines(tmp_path / "sft.jsonl", [{**traces[0], field: ""}]))
    with pytest.raises(UserError, match=r":1: trace_id is not a known field"):
        load_problems(write_lines(tmp_path / "sft.jsonl", traces))


def test_parquet_holds_nested_fields_as_structs_or_as_json_text(tmp_path: pathlib.Path) -> None:
    records = [record("math", id="a", meta={"level": 3}), record("choice", id="b", meta={"year": 2025})]
    as_text = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in records]
    for name, rows in [("structs", records), ("text", as_text)]:
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        # the struct of verifier has null `options` in row 1: dropped, not an unknown field
        assert load_problems(path) == [render(problem_from_dict(r, "memory")) for r in records]


def test_parquet_rows_are_counted_from_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "set.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record(id="a"), record(id=" ")]), path)
    with pytest.raises(UserError, match=r"set\.parquet:2: id is ' '"):
        load_problems(path)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match=r"set\.parquet: not a Parquet file"):
        load_problems(path)


def test_records_import_no_jax() -> None:
    code = "import sys, vibethinker_jax.data.records; sys.exit(any(m in sys.modules for m in ('jax', 'grain', 'flax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
