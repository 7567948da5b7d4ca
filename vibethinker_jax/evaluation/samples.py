"""The files of an evaluation: `run.json` says what was asked, `samples.jsonl` has one line per judged sample."""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from etils import epath

from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import Verdict
from vibethinker_jax.run_files import differing_fields, write_json

MANIFEST, SAMPLES, REPORT = "run.json", "samples.jsonl", "report.json"
Key = tuple[str, int]  # (problem id, sample index)


@dataclass(frozen=True)
class SampleRecord:
    """One line of `samples.jsonl`.

    Attributes:
        problem_id, sample: which sample this is; sample counts from 0 within the problem.
        seed: of the problem; the sample index selects the sample under it.
        prompt_sha256: of the prompt's messages.
        prompt_tokens, tokens: lengths; the stop token is counted.
        finish_reason: "stop" or "length".
        text: the response.
        verdict: what the verifier said of it.
    """

    problem_id: str
    sample: int
    seed: int
    prompt_sha256: str
    prompt_tokens: int
    tokens: int
    finish_reason: str
    text: str
    verdict: Verdict

    @property
    def key(self) -> Key:
        return self.problem_id, self.sample

    def to_line(self) -> bytes:
        return json.dumps(vars(self) | {"verdict": self.verdict.to_dict()}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Raises ValueError, KeyError or TypeError for anything that `to_line` did not write."""
        record = json.loads(line)
        return cls(**record | {"verdict": Verdict.from_dict(record["verdict"])})


def read_samples(path: epath.Path) -> tuple[dict[Key, SampleRecord], int]:
    """The samples of a file by key, and the length in bytes of its sound part.

    A kill may leave a torn last line; it is left out. Where a key occurs twice, the later line (a verdict that was
    repeated after an error) counts.

    Raises:
        UserError: a line before the last is damaged.
    """
    content = path.read_bytes() if path.exists() else b""
    records: dict[Key, SampleRecord] = {}
    sound = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            record = SampleRecord.from_line(line)
        except (ValueError, KeyError, TypeError) as damage:
            if sound + len(line) == len(content):
                break
            advice = "remove that line, its sample will be drawn again"
            raise UserError(f"{path}:{number}: the line is damaged ({type(damage).__name__}); {advice}") from damage
        if not line.endswith(b"\n"):
            break
        records[record.key] = record
        sound += len(line)
    return records, sound


def read_manifest(output: epath.Path) -> dict[str, Any]:
    """What the evaluation in `output` was asked; UserError if there is none."""
    path = output / MANIFEST
    if not path.exists():
        raise UserError(f"{output}: holds no evaluation ({MANIFEST} is absent); give the --output of an eval run")
    return json.loads(path.read_text())


class SampleLog:
    """The samples of one evaluation, on disk as soon as they are judged. One process writes; a context manager.

    Args:
        output: a local directory; created if absent. (Object stores cannot append.)
        manifest: everything that determines the samples, plain JSON types.

    Raises:
        UserError: the directory holds samples of another manifest, or another process is writing there.
    """

    def __init__(self, output: epath.PathLike, manifest: Mapping[str, Any]) -> None:
        self.directory = epath.Path(output)
        if "://" in os.fspath(self.directory):
            raise UserError(f"--output is {self.directory}; give a local directory, samples are appended one by one")
        manifest = json.loads(json.dumps(manifest))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / SAMPLES
        self._file = open(path, "ab")  # noqa: SIM115 (closed by `__exit__`)
        try:
            self._lock_file(path)
            self._check_manifest(manifest, path)
            self.records, sound = read_samples(path)
            self._file.truncate(sound)
        except BaseException:
            self._file.close()
            raise

    def _lock_file(self, path: epath.Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{path}: another evaluation is writing there; wait for it, or use another --output"
            ) from None

    def _check_manifest(self, manifest: dict[str, Any], samples: epath.Path) -> None:
        path = self.directory / MANIFEST
        if path.exists():
            differing = differing_fields(json.loads(path.read_text()), manifest)
            if differing:
                fields = "; ".join(f"{name} was {old!r} and is now {new!r}" for name, old, new in differing)
                raise UserError(f"{path}: {fields}. Resume with the old values, or use another --output")
        elif samples.stat().length:
            raise UserError(f"{samples}: has samples but {MANIFEST} is absent; use another --output")
        else:
            write_json(path, manifest)

    def append(self, record: SampleRecord) -> None:
        """Writes one line and hands it to the operating system: it survives a kill of this process."""
        self._file.write(record.to_line())
        self._file.flush()
        self.records[record.key] = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
