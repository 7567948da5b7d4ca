"""Foreign formats: each is a set of marking fields and one small function from a row to a record.

The functions return plain records; `records.problem_from_dict` validates them like any other. A new format is
one function and one line in `FORMATS`; a new benchmark is one line in `BENCHMARKS`. Imports no JAX.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vibethinker_jax.data import schema
from vibethinker_jax.data.instruction_kwargs import check_instructions
from vibethinker_jax.data.render import permute
from vibethinker_jax.errors import UserError

Row = Mapping[str, Any]

# The instruction that Qwen documents for its mathematics models; asks for the form that the verifier extracts.
MATH_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Format:
    """A way to write problems.

    Attributes:
        name: what error messages call it.
        marks: fields that tell it from the other formats. A row is of the first format of `FORMATS` whose
            marks it has: all of them, or any where `any_mark` is set (so that a record of our own that lacks
            a field is reported as such, not as an unknown format).
        to_record: (row, stem of the file name, index of the row from 0, where) -> record.
    """

    name: str
    marks: tuple[str, ...]
    to_record: Callable[[Row, str, int, str], dict[str, Any]]
    any_mark: bool = False

    def matches(self, row: Row) -> bool:
        present = [mark in row for mark in self.marks]
        return any(present) if self.any_mark else all(present)

    def record(self, row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
        """The record of one row; a row that the format's function cannot read is a `UserError`."""
        missing = [mark for mark in self.marks if mark not in row]
        if missing and not self.any_mark:
            raise UserError(f"{where}: {missing[0]} is missing; every row of a {self.name} file needs it")
        return self.to_record(row, stem, index, where)


def _from_record(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    return dict(row)


def _from_gsm8k(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    """{"question", "answer"}, the answer ending with `#### 1,234`; the worked solution is kept in `meta`."""
    schema.check_text(row["question"], where, "question")
    schema.check_text(row["answer"], where, "answer")
    solution, mark, gold = row["answer"].rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", gold):
        schema.fail(where, "answer", row["answer"][-60:], "end it with '#### ' and a number, as GSM8K does")
    prefix = stem if stem.startswith("gsm8k") else f"gsm8k-{stem}"
    meta = {"source": "gsm8k", "solution": solution.strip()}
    return _math_record(f"{prefix}-{index}", row["question"], gold, meta)


def _from_verl(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    """verl's columns {"prompt", "reward_model": {"ground_truth", "style"}, "ability", ...}; keeps its prompt.

    Only mathematics: the gold of a multiple-choice row is a letter, which says nothing once options are
    permuted, so such a row is refused rather than read as an equation.
    """
    reward_model = row["reward_model"]
    schema.check_object(reward_model, where, "reward_model")
    if row.get("ability") != "math":
        schema.fail(where, "ability", row.get("ability"), "give rows of ability 'math'")
    if reward_model.get("style") != "rule":
        schema.fail(where, "reward_model.style", reward_model.get("style"), "give rows of style 'rule'")
    gold = reward_model.get("ground_truth")
    if isinstance(gold, bool) or not isinstance(gold, int | str):
        schema.fail(where, "reward_model.ground_truth", gold, "write an integer or text")
    schema.check_prompt(row["prompt"], where, "prompt")
    question = row["prompt"][-1]["content"]
    if re.fullmatch(r"[A-Z]", str(gold)) and all(re.search(rf"^\(?{x}[.):]", question, re.MULTILINE) for x in "AB"):
        todo = "name a multiple-choice benchmark, or write records with a 'choice' verifier"
        schema.fail(where, "reward_model.ground_truth", gold, todo)
    meta = {name: row[name] for name in ("data_source", "extra_info") if row.get(name)}
    return {
        "id": f"{stem}-{index}",
        "domain": "math",
        "prompt": [dict(message) for message in row["prompt"]],
        "verifier": {"kind": "math", "answer": str(gold)},
        "meta": meta,
    }


def _from_multiple_choice(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    """verl's columns with a letter for a gold and the options in the question, as VibeThinker's copy of GPQA has them.

    The gold letter is A in all its rows: the record is rendered, so that always answering "A" scores by chance.
    """
    schema.check_object(row["reward_model"], where, "reward_model")
    schema.check_prompt(row["prompt"], where, "prompt")
    question = row["prompt"][-1]["content"]
    options = _listed_options(question)
    letters = string.ascii_uppercase[: len(options)]
    gold = row["reward_model"].get("ground_truth")
    if len(options) < 2:
        schema.fail(where, "prompt[-1].content", question[-80:], "list at least two options, each as a line 'A. text'")
    if gold not in tuple(letters):
        schema.fail(where, "reward_model.ground_truth", gold, f"write the letter of an option, one of {letters}")
    record = {
        "id": f"{stem}-{index}",
        "domain": "stem",
        "prompt": [dict(message) for message in row["prompt"]],
        "verifier": {"kind": "choice", "options": options, "answer": gold},
        "meta": {name: row[name] for name in ("data_source", "extra_info") if row.get(name)},
    }
    return permute(record, sample=0, seed=0, where=where)


def _listed_options(question: str) -> list[str]:
    """Texts behind the last `A.`, `B.`, ... at line starts; the last text ends at a blank line."""
    labels = list(re.finditer(r"^\(?([A-Z])[.)][ \t]+", question, re.MULTILINE))
    first = max((index for index, label in enumerate(labels) if label[1] == "A"), default=len(labels))
    labels = labels[first:]
    count = next((i for i, label in enumerate(labels) if label[1] != string.ascii_uppercase[i : i + 1]), len(labels))
    starts = [label.end() for label in labels[:count]]
    ends = [label.start() for label in labels[1:count]]
    if starts:
        blank = re.compile(r"\n[ \t]*\n").search(question, starts[-1])
        ends.append(blank.start() if blank else len(question))
    return [question[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _from_imo_answerbench(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    """IMO-AnswerBench's columns {"Problem ID", "Problem", "Short Answer", "Category", ...}."""
    for name in ("Problem ID", "Problem", "Short Answer"):
        schema.check_text(row[name], where, name)
    meta = {name.lower(): row[name] for name in ("Category", "Subcategory", "Source") if row.get(name)}
    return _math_record(row["Problem ID"].strip(), row["Problem"], row["Short Answer"].strip(), meta)


def _from_ifeval(row: Row, stem: str, index: int, where: str) -> dict[str, Any]:
    """Columns {"key", "prompt", "instruction_id_list", "kwargs"} of IFEval and IFBench.

    Their kwargs hold a null for each argument that a type does not have, and some whole numbers as 4.0.
    """
    schema.check_text(row["prompt"], where, "prompt")
    ids, kwargs = row["instruction_id_list"], row["kwargs"]
    schema.list_of(schema.check_text)(ids, where, "instruction_id_list")
    schema.list_of(schema.check_object)(kwargs, where, "kwargs")
    if len(ids) != len(kwargs):
        schema.fail(where, "kwargs", kwargs, f"list one object for each of the {len(ids)} instructions")
    kwargs = [{name: _whole(value) for name, value in item.items() if value is not None} for item in kwargs]
    check_instructions(ids, kwargs, where, field="")
    return {
        "id": f"{stem}-{row['key']}",
        "domain": "instruct",
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "verifier": {"kind": "instructions", "instruction_ids": ids, "kwargs": kwargs},
    }


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _math_record(id: str, question: str, answer: str, meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "domain": "math",
        "prompt": [{"role": "user", "content": f"{question.strip()}\n{MATH_INSTRUCTION}"}],
        "verifier": {"kind": "math", "answer": answer},
        "meta": meta,
    }


FORMATS = (
    Format("records", ("domain", "verifier"), _from_record, any_mark=True),
    Format("verl", ("prompt", "reward_model"), _from_verl),
    Format("multiple-choice", ("prompt", "reward_model"), _from_multiple_choice),
    Format("imo-answerbench", ("Problem ID", "Problem", "Short Answer"), _from_imo_answerbench),
    Format("ifeval", ("key", "prompt", "instruction_id_list", "kwargs"), _from_ifeval),
    Format("gsm8k", ("question", "answer"), _from_gsm8k),
)

# benchmark -> the foreign format that its public file has; records of our own are accepted for every benchmark
BENCHMARKS = {
    "aime24": "verl",
    "aime25": "verl",
    "aime26": "verl",
    "brumo25": "verl",
    "gpqa-diamond": "multiple-choice",
    "gsm8k": "gsm8k",
    "hmmt25": "verl",
    "ifbench": "ifeval",
    "ifeval": "ifeval",
    "imo-answerbench": "imo-answerbench",
}


def detect(row: Row, where: str, benchmark: str | None = None) -> Format:
    """The format of a file, from its first row.

    Args:
        row: fields of the first row.
        where: what error messages start with.
        benchmark: one of `BENCHMARKS`, or None for any format.

    Raises:
        UserError: unknown benchmark, or fields that are no known format; lists what was found.
    """
    if benchmark is not None and benchmark not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(f"{where}: benchmark is {benchmark!r}; use one of {known}, or none to detect the format")
    allowed = [f for f in FORMATS if benchmark is None or f.name in ("records", BENCHMARKS[benchmark])]
    for layout in allowed:
        if layout.matches(row):
            return layout
    wanted = "; ".join(f"{f.name}: {(' or ' if f.any_mark else ', ').join(f.marks)}" for f in allowed)
    found = ", ".join(map(str, row)) or "none"
    raise UserError(f"{where}: the fields are {found}; give a file of a known format ({wanted})")
