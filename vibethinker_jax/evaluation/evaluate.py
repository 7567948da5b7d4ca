"""Evaluation: sample, judge, record, report; stoppable at any moment and continued where it stopped.

1. Every problem gets a seed from (run seed, problem id); the sample index selects the sample under it. The samples of a
   problem thus do not depend on the other problems, their order, or how often the run was interrupted.
2. The engine decodes; each response goes to the verifier pool as it finishes, so judging overlaps decoding.
3. Each judged sample is appended to `samples.jsonl` at once.
4. When all are there, `report.json` is computed from that file alone.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from etils import epath
from tqdm import tqdm

from vibethinker_jax.errors import UserError
from vibethinker_jax.evaluation.benchmarks import get_benchmark
from vibethinker_jax.evaluation.report import Report, summarise
from vibethinker_jax.evaluation.samples import REPORT, SampleLog, SampleRecord
from vibethinker_jax.rewards.base import Verdict, checked
from vibethinker_jax.rewards.pool import VerifierPool
from vibethinker_jax.run_files import write_json
from vibethinker_jax.seeds import stable_seed

if TYPE_CHECKING:  # only for the reader: evaluation needs no JAX itself
    from vibethinker_jax.data.records import Problem
    from vibethinker_jax.rollout.engine import Completion, RolloutEngine, SamplingParams


def evaluate(
    engine: "RolloutEngine",
    problems: "Sequence[Problem]",
    *,
    samples: int,
    params: "SamplingParams",
    pool: VerifierPool,
    output: epath.PathLike,
    benchmark: str = "problems",
    seed: int = 0,
    checkpoint: str | None = None,
) -> Report:
    """Evaluates what the engine serves on problems, or continues an evaluation that was interrupted.

    Args:
        engine: decodes; used through `submit`, `completions` and `cancel`. It must have no other requests under way.
        problems: with unique ids.
        samples: responses per problem.
        params: sampling parameters; their `n` and `seed` are set here.
        pool: judges the responses.
        output: local directory for `run.json`, `samples.jsonl` and `report.json`. Samples that are there already are
            kept, and those whose verdict was an error are judged again.
        benchmark: name of a benchmark, whose published figures stand beside ours.
        seed: of sampling and of the bootstrap.
        checkpoint: what the engine serves, for the record: a resumed evaluation must name the same.

    Returns:
        The report, also written to OUTPUT/report.json; `str(report)` is its table.

    Raises:
        UserError: invalid problems, or an output directory of an evaluation with other settings.
    """
    _check(problems, samples)
    by_id = {problem.id: problem for problem in problems}
    sampling = {name: value for name, value in dataclasses.asdict(params).items() if name not in ("n", "seed")}
    window = getattr(engine, "max_length", None)  # it truncates as max_new_tokens does
    manifest = {
        "benchmark": get_benchmark(benchmark).name,
        "checkpoint": checkpoint,
        "samples": samples,
        "seed": seed,
        "params": sampling,
        "max_length": window,
        "problems": len(problems),
        "problems_sha256": _digest([[p.id, [dict(m) for m in p.prompt], dict(p.verifier)] for p in problems]),
    }
    with SampleLog(output, manifest) as log:
        wanted = [(problem.id, sample) for problem in problems for sample in range(samples)]
        done = sum(key in log.records and log.records[key].verdict.error is None for key in wanted)
        with (
            tqdm(total=len(wanted), initial=done, desc=f"eval {benchmark}", unit=" sample") as progress,
            _Judge(pool, log, progress) as judge,
        ):
            for record in [record for record in log.records.values() if record.verdict.error is not None]:
                judge.submit(by_id[record.problem_id], record)
            _sample_missing(engine, problems, samples, params, seed, judge, log)
        report = summarise(log.records, list(by_id), samples, get_benchmark(benchmark), sampling, window, seed)
        write_json(log.directory / REPORT, report.to_dict())
    return report


def problem_seed(seed: int, problem_id: str) -> int:
    """The sampling seed of a problem: a stable hash of (run seed, id), in [0, 2**31)."""
    return stable_seed(seed, problem_id)


class _Judge:
    """Judges records in the pool and appends them to the log, both off the decoding thread."""

    def __init__(self, pool: VerifierPool, log: SampleLog, progress: tqdm) -> None:
        self._pool, self._log, self._progress = pool, log, progress
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._writes: deque[Future[None]] = deque()

    def submit(self, problem: "Problem", record: SampleRecord) -> None:
        """Queues a record whose verdict is still to come. Raises what an earlier record failed with."""
        verdict = self._pool.submit(problem, record.text)
        self._writes.append(self._writer.submit(self._write, record, verdict))
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def _write(self, record: SampleRecord, verdict: Future[Verdict]) -> None:
        self._log.append(dataclasses.replace(record, verdict=verdict.result()))
        self._progress.update()

    def __enter__(self) -> "_Judge":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._writer.shutdown(wait=True)  # verdicts under way are saved even when decoding failed
        if error is None:
            for write in self._writes:
                write.result()


def _sample_missing(
    engine: "RolloutEngine",
    problems: "Sequence[Problem]",
    samples: int,
    params: "SamplingParams",
    seed: int,
    judge: _Judge,
    log: SampleLog,
) -> None:
    """Draws the samples that the log lacks.

    A sample's random key is (problem seed, sample index), so the engine draws indices 0 .. last missing one again and
    those that the log has are passed over: they are the same, and only the few problems that were under way when a run
    stopped have any.
    """
    missing = {p.id: [i for i in range(samples) if (p.id, i) not in log.records] for p in problems}
    todo = [problem for problem in problems if missing[problem.id]]
    drawn = [dataclasses.replace(params, n=max(missing[p.id]) + 1, seed=problem_seed(seed, p.id)) for p in todo]
    with contextlib.closing(_completions(engine, [list(p.prompt) for p in todo], drawn)) as completions:
        for index, sample, completion in completions:
            problem = todo[index]
            if sample in missing[problem.id]:
                judge.submit(problem, _record(problem, sample, drawn[index].seed, completion))
                missing[problem.id].remove(sample)
    lacking = sum(map(len, missing.values()))
    if lacking:
        raise RuntimeError(f"the engine ended with {lacking} samples missing")


def _completions(
    engine: "RolloutEngine", prompts: list[Any], params: "list[SamplingParams]"
) -> "Iterator[tuple[int, int, Completion]]":
    """(prompt index, sample index, completion) as the engine finishes them."""
    if not prompts:
        return
    handle = engine.submit(prompts, params)
    try:
        for finished_handle, index, sample, completion in engine.completions():
            if finished_handle != handle:
                raise UserError("the engine has other requests under way; take their completions before evaluating")
            yield index, sample, completion
    except BaseException:
        engine.cancel(handle)  # nothing of this evaluation may be left in the engine for its next user
        raise


def _record(problem: "Problem", sample: int, seed: int, completion: "Completion") -> SampleRecord:
    return SampleRecord(
        problem_id=problem.id,
        sample=sample,
        seed=seed,
        prompt_sha256=_digest([dict(message) for message in problem.prompt]),
        prompt_tokens=len(completion.prompt_tokens),
        tokens=len(completion.tokens),
        finish_reason=completion.finish_reason,
        text=completion.text,
        verdict=Verdict.failed("not judged yet"),
    )


def _check(problems: "Sequence[Problem]", samples: int) -> None:
    if samples < 1:
        raise UserError(f"--samples is {samples}; draw at least 1 per problem")
    if not problems:
        raise UserError("problems is empty; give at least one")
    seen = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"problem {problem.id}: id occurs twice; ids must be unique")
        seen.add(problem.id)
        checked(problem, "")  # a verifier that cannot judge stops the run before anything is decoded


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
