"""Two evaluations of the same problems, compared problem by problem."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from etils import epath

from vibethinker_jax.errors import UserError
from vibethinker_jax.evaluation.protocol import Estimate, average_at_n, paired_difference
from vibethinker_jax.evaluation.report import align, percent, without_nan
from vibethinker_jax.evaluation.samples import SAMPLES, SampleRecord, read_manifest, read_samples
from vibethinker_jax.run_files import differing_fields


@dataclass(frozen=True)
class Comparison:
    """The second run against the first. Scores are shares in [0, 1], lengths tokens.

    Attributes:
        first, second: the directories.
        scores: avg@n of both.
        score_difference: second - first over problems, paired.
        tokens: mean response length of both, first averaged within each problem.
        token_difference: second - first over problems, paired.
        differences: settings in which the runs differ, the checkpoint included: (field, first, second).
    """

    first: str
    second: str
    scores: tuple[float, float]
    score_difference: Estimate
    tokens: tuple[float, float]
    token_difference: Estimate
    differences: tuple[tuple[str, Any, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return without_nan(asdict(self))

    def __str__(self) -> str:
        return format_comparison(self)


def compare(first: epath.PathLike, second: epath.PathLike, seed: int = 0) -> Comparison:
    """Compares two finished evaluations, given by their output directories.

    Args:
        seed: of the bootstrap over problems.

    Raises:
        UserError: a directory holds no finished evaluation, or the two are not of the same problems.
    """
    runs = [_Run(epath.Path(path)) for path in (first, second)]
    ids = sorted(runs[0].problem_ids)  # not in the order of completion: the bootstrap shall be reproducible
    if runs[0].problem_ids != runs[1].problem_ids:
        only = [len(a.problem_ids - b.problem_ids) for a, b in (runs, runs[::-1])]
        raise UserError(
            f"{second}: its problems are not those of {first} ({only[0]} only in the first, {only[1]} only in the "
            "second); evaluate both on the same file with the same --limit"
        )
    scores = [run.table(ids, lambda record: record.verdict.reward) for run in runs]
    tokens = [run.table(ids, lambda record: record.tokens) for run in runs]
    return Comparison(
        first=str(first),
        second=str(second),
        scores=tuple(average_at_n(table, seed).value for table in scores),
        score_difference=paired_difference(*scores, seed=seed),
        tokens=tuple(average_at_n(table, seed).value for table in tokens),
        token_difference=paired_difference(*tokens, seed=seed),
        differences=tuple(differing_fields(runs[0].manifest, runs[1].manifest)),
    )


class _Run:
    def __init__(self, output: epath.Path) -> None:
        self.manifest: Mapping[str, Any] = read_manifest(output)
        self.records, _ = read_samples(output / SAMPLES)
        self.samples: int = self.manifest["samples"]
        self.problem_ids = {problem_id for problem_id, _ in self.records}
        expected = self.manifest["problems"] * self.samples
        if len(self.records) != expected:
            found = f"{len(self.records)} of {expected} samples"
            raise UserError(f"{output}: holds {found}; run the same eval command again to finish it")

    def table(self, problem_ids: list[str], value: Any) -> np.ndarray:
        def cell(problem_id: str, sample: int) -> float:
            record: SampleRecord = self.records[problem_id, sample]
            return value(record)

        return np.array([[cell(problem_id, sample) for sample in range(self.samples)] for problem_id in problem_ids])


def format_comparison(comparison: Comparison) -> str:
    """The table that the command line prints."""
    score, token = comparison.score_difference, comparison.token_difference
    verdict = "no difference beyond the interval" if score.low <= 0 <= score.high else "differs beyond the interval"
    if np.isnan(score.low):
        verdict = "no interval: it takes at least two problems with verdicts"
    rows = [
        ("score", f"{percent(comparison.scores[0])} -> {percent(comparison.scores[1])}"),
        ("difference", f"{100 * score.value:+.1f} points, 95% interval {_span(score, 100, 1)}: {verdict}"),
        ("tokens", f"{comparison.tokens[0]:,.0f} -> {comparison.tokens[1]:,.0f}"),
        ("difference", f"{token.value:+,.0f}, 95% interval {_span(token, 1, 0)}"),
        ("no verdict", f"{score.missing:,} of {score.samples + score.missing:,} samples, counted nowhere"),
        *((f"{name}", f"{old!r} -> {new!r}") for name, old, new in comparison.differences),
    ]
    return f"{comparison.second} against {comparison.first}: {score.problems:,} problems, paired\n" + align(rows)


def _span(estimate: Estimate, scale: float, digits: int) -> str:
    return f"{scale * estimate.low:+,.{digits}f} to {scale * estimate.high:+,.{digits}f}"
