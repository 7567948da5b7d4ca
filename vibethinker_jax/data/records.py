"""Problems and SFT examples: the records of every stage, read from files and validated once, at load.

Imports no JAX: `vt.load_problems` and `vt.verify` work where no accelerator stack is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etils import epath
from tqdm import tqdm

from vibethinker_jax.data import files, schema, sources
from vibethinker_jax.data.render import render
from vibethinker_jax.errors import UserError

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass(frozen=True)
class Problem:
    """One query with the means to judge a response to it.

    Attributes:
        id: unique in a file.
        domain: "math", "code", "stem", "instruct" or "chat".
        prompt: chat messages, the last one from the user.
        verifier: {"kind": ..., ...} as `schema.py` tables it.
        meta: anything else that is worth keeping; nothing computes with it.
    """

    id: str
    domain: str
    prompt: tuple[Message, ...]
    verifier: Mapping[str, Any]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as one line of JSON holds it; `problem_from_dict` gives an equal problem back."""
        return {
            "id": self.id,
            "domain": self.domain,
            "prompt": [dict(message) for message in self.prompt],
            "verifier": dict(self.verifier),
            "meta": dict(self.meta),
        }


@dataclass(frozen=True)
class Example(Problem):
    """One SFT trace: a problem with a response to learn. (id, trace_id) is unique in a file."""

    trace_id: str = field(kw_only=True)
    response: str = field(kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "trace_id": self.trace_id, "response": self.response}


_REQUIRED: dict[str, schema.Check] = {
    "id": schema.check_text,
    "domain": schema.check_domain,
    "prompt": schema.check_prompt,
    "verifier": schema.check_verifier,
}
_REQUIRED_OF_EXAMPLES = {**_REQUIRED, "trace_id": schema.check_text, "response": schema.check_text}
_OPTIONAL: dict[str, schema.Check] = {"meta": schema.check_object}


def problem_from_dict(record: Mapping[str, Any], where: str) -> Problem:
    """Validates one record.

    Args:
        record: the fields of `Problem`, `meta` optional, `prompt` a list of messages.
        where: what error messages start with, e.g. "train.jsonl:17".

    Raises:
        UserError: an unknown or missing field, or a value that no verifier could use.
    """
    schema.check_fields(record, where, "", _REQUIRED, _OPTIONAL)
    return Problem(**_fields(record))


def example_from_dict(record: Mapping[str, Any], where: str) -> Example:
    """Like `problem_from_dict`, for a record that also has `trace_id` and `response`."""
    schema.check_fields(record, where, "", _REQUIRED_OF_EXAMPLES, _OPTIONAL)
    return Example(**_fields(record), trace_id=record["trace_id"], response=record["response"])


def load_problems(path: epath.PathLike, benchmark: str | None = None) -> list[Problem]:
    """Reads the problems of one file, in its order.

    Args:
        path: JSONL, Parquet or CSV, local or gs://. Lines of JSONL and rows of Parquet count from 1.
        benchmark: what the file is, one of `sources.BENCHMARKS`: then only that benchmark's format (or
            records of our own) is accepted. None: the format is detected from the fields of the first row.

    Returns:
        The problems; those with options as sample 0 shows them (data/render.py).

    Raises:
        UserError: naming file, line and field.
    """
    path = epath.Path(path)
    rows = _rows(path)
    layout = sources.detect(rows[0][1], where=f"{path}:{rows[0][0]}", benchmark=benchmark)
    problems, seen = [], {}
    for index, (line, row) in enumerate(tqdm(rows, desc=f"checking {path.name}", unit=" records", delay=5)):
        where = f"{path}:{line}"
        problem = problem_from_dict(layout.record(row, path.stem, index, where), where)
        _refuse_duplicate(seen, problem.id, line, where, "id")
        problems.append(render(problem))
    return problems


def load_examples(path: epath.PathLike) -> list[Example]:
    """Reads the SFT examples of one JSONL or Parquet file, in its order.

    Raises:
        UserError: naming file, line and field.
    """
    path = epath.Path(path)
    examples, seen = [], {}
    for line, row in tqdm(_rows(path), desc=f"checking {path.name}", unit=" records", delay=5):
        where = f"{path}:{line}"
        example = example_from_dict(row, where)
        _refuse_duplicate(seen, (example.id, example.trace_id), line, where, "(id, trace_id)")
        examples.append(example)
    return examples


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": record["id"],
        "domain": record["domain"],
        "prompt": tuple(dict(message) for message in record["prompt"]),
        "verifier": dict(record["verifier"]),
        "meta": dict(record.get("meta", {})),
    }


def _rows(path: epath.Path) -> list[files.NumberedRow]:
    rows = list(tqdm(files.read_rows(path), desc=f"reading {path.name}", unit=" rows", delay=5))
    if not rows:
        raise UserError(f"{path}: the file holds no records; give one that does")
    if path.suffix == ".parquet":
        return [(number, _unpack_json_columns(row, f"{path}:{number}")) for number, row in rows]
    return rows


def _unpack_json_columns(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Decodes nested fields that are JSON text: how Parquet holds records whose verifiers differ in shape."""
    if "verifier" not in row:  # not a record of our own
        return row
    texts = {name: row[name] for name in ("prompt", "verifier", "meta") if isinstance(row.get(name), str)}
    return row | {name: files.parse_json(text, f"{where}: {name}") for name, text in texts.items()}


def _refuse_duplicate(seen: dict[Any, int], key: Any, line: int, where: str, field: str) -> None:
    if key in seen:
        schema.fail(where, field, key, f"make it unique, line {seen[key]} has it too")
    seen[key] = line
