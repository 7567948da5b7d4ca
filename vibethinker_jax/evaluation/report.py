"""What an evaluation found, as numbers and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vibethinker_jax.evaluation.benchmarks import Benchmark, Published
from vibethinker_jax.evaluation.protocol import Estimate, average_at_n, pass_at_k
from vibethinker_jax.evaluation.samples import Key, SampleRecord


@dataclass(frozen=True)
class Report:
    """The outcome of an evaluation. Figures are shares in [0, 1]; lengths are tokens.

    Attributes:
        benchmark: its name.
        samples_per_problem: n of avg@n.
        figure: avg@n of the reward with its uncertainty; `figure.missing` samples had no verdict.
        pass_at_k: k -> (unbiased pass@k, problems it is over). Empty where correctness is undefined.
        truncation_rate: share of all samples cut off by a length limit.
        mean_tokens, p95_tokens: response length over all samples.
        errors: message -> number of samples, for samples without a verdict.
        published: figures of papers.
        differences: how this run's protocol differs from the one of the published figures; empty: it does not.
        caveat: what no run of ours reproduces of the published protocol.
    """

    benchmark: str
    samples_per_problem: int
    figure: Estimate
    pass_at_k: Mapping[int, tuple[float, int]]
    truncation_rate: float
    mean_tokens: float
    p95_tokens: float
    errors: Mapping[str, int]
    published: Sequence[Published]
    differences: Sequence[str]
    caveat: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON; a figure that does not exist is None."""
        return without_nan(asdict(self))

    def __str__(self) -> str:
        return format_report(self)


def summarise(
    records: Mapping[Key, SampleRecord],
    problem_ids: Sequence[str],
    samples: int,
    benchmark: Benchmark,
    params: Mapping[str, Any],
    window: int | None,
    seed: int,
) -> Report:
    """Computes the report of complete samples.

    Args:
        records: every (problem id, sample index) of `problem_ids` x `samples`.
        params: the sampling parameters in use, by name.
        window: most tokens of prompt and response together; None if unknown.
        seed: of the bootstrap.
    """
    rows = [[records[problem_id, sample] for sample in range(samples)] for problem_id in problem_ids]
    chosen = [record for row in rows for record in row]
    rewards = np.array([[record.verdict.reward for record in row] for row in rows])
    correct = np.array([[_share(record.verdict.correct) for record in row] for row in rows])
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    lengths = np.array([record.tokens for record in chosen])
    errors: dict[str, int] = {}
    for record in chosen:
        if record.verdict.error is not None:
            errors[record.verdict.error] = errors.get(record.verdict.error, 0) + 1
    return Report(
        benchmark=benchmark.name,
        samples_per_problem=samples,
        figure=average_at_n(rewards, seed=seed),
        pass_at_k={} if np.isnan(correct).all() else {k: pass_at_k(correct, k) for k in ks},
        truncation_rate=float(np.mean([record.finish_reason == "length" for record in chosen])),
        mean_tokens=float(lengths.mean()),
        p95_tokens=float(np.percentile(lengths, 95)),
        errors=errors,
        published=benchmark.published,
        differences=protocol_differences(benchmark, len(problem_ids), samples, params, window),
        caveat=benchmark.caveat,
    )


def protocol_differences(
    benchmark: Benchmark, problems: int, samples: int, params: Mapping[str, Any], window: int | None
) -> list[str]:
    """How a run departs from a benchmark's protocol, one phrase each. Arguments as in `summarise`."""
    found = []
    if benchmark.problems is not None and problems != benchmark.problems:
        found.append(f"{problems} of {benchmark.problems} problems")
    if samples != benchmark.samples:
        found.append(f"{samples} samples per problem, not {benchmark.samples}")
    for name in ("temperature", "top_p", "top_k"):
        if name in params and params[name] != getattr(benchmark, name):
            found.append(f"{name} {params[name]}, not {getattr(benchmark, name)}")
    limit = params.get("max_new_tokens")
    if limit is not None:
        found.append(f"at most {limit:,} new tokens, not the model's window")
    if benchmark.window is not None and window is not None and window < benchmark.window:
        found.append(f"a window of {window:,} tokens, not {benchmark.window:,}")
    return found


def format_report(report: Report) -> str:
    """The table that the command line prints."""
    figure, n = report.figure, report.samples_per_problem
    total = figure.samples + figure.missing
    rows = [
        (f"avg@{n}", f"{percent(figure.value)}   {uncertainty(figure)}"),
        *(
            (f"pass@{k}", _pass(value, count, figure.problems))
            for k, (value, count) in report.pass_at_k.items()
            if k > 1
        ),
        ("truncated", f"{percent(report.truncation_rate)} of {total:,} samples"),
        ("tokens", f"mean {report.mean_tokens:,.0f}, 95th percentile {report.p95_tokens:,.0f}"),
        ("no verdict", f"{figure.missing:,} of {total:,} samples" + (", counted nowhere" if figure.missing else "")),
        *(("  " + message[:60], f"{count:,}") for message, count in report.errors.items()),
        *(("published", f"{percent(p.value)} {p.metric} ({p.source})") for p in report.published),
    ]
    if report.published and report.differences:
        rows.append(("", f"NOT comparable with the published figures: {'; '.join(report.differences)}"))
    elif report.differences:
        rows.append(("protocol", "; ".join(report.differences)))
    if report.published and report.caveat:
        rows.append(("", f"note: {report.caveat}"))
    return f"{report.benchmark}: {figure.problems:,} problems x {n} samples\n" + align(rows)


def percent(share: float) -> str:
    """A share as a percentage with one digit; n/a for NaN."""
    return "n/a" if math.isnan(share) else f"{100 * share:.1f}%"


def uncertainty(estimate: Estimate) -> str:
    """Interval and standard error of an estimate in words."""
    if math.isnan(estimate.low):
        return "(no interval: it takes at least two problems with verdicts)"
    if estimate.low == estimate.high:
        return "(all problems scored alike: the bootstrap says nothing about the uncertainty)"
    low, high = percent(estimate.low), percent(estimate.high)
    return f"95% interval {low} to {high} over problems, standard error {percent(estimate.standard_error)}"


def align(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the first as wide as its widest entry."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _pass(value: float, count: int, problems: int) -> str:
    return percent(value) + ("" if count == problems else f" over the {count} problems with enough verdicts")


def _share(correct: bool | None) -> float:
    return math.nan if correct is None else float(correct)


def without_nan(value: Any) -> Any:
    """Plain types with None for NaN, which strict JSON lacks."""
    match value:
        case float() if math.isnan(value):
            return None
        case dict():
            return {str(key): without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [without_nan(item) for item in value]
    return value
