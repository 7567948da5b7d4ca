"""Statistics of sampled evaluations: avg@n, its uncertainty over problems, pass@k, paired differences.

A score table has one row per problem and one column per sample; NaN marks a sample without a verdict (the machinery
failed), which leaves numerator and denominator. The unit of uncertainty is the *problem*: 64 samples of 30 problems are
30 observations, and an interval over the pool of 1,920 would be several times too narrow.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95
RESAMPLES = 10_000
_CHUNK = 500  # resamples drawn at a time: 500 x 1,319 problems of GSM8K are 5 MiB of indices


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its uncertainty.

    Attributes:
        value: mean over problems of the mean over samples (avg@n); NaN without any verdict.
        standard_error: sample standard deviation over problems / sqrt(problems); NaN below two problems.
        low, high: ends of the 95% percentile bootstrap interval over problems; NaN below two problems.
        problems: problems with at least one verdict.
        samples: samples with a verdict.
        missing: samples without one.
    """

    value: float
    standard_error: float
    low: float
    high: float
    problems: int
    samples: int
    missing: int


def problem_means(scores: Float[np.ndarray, "problems samples"]) -> Float[np.ndarray, "problems"]:
    """Mean score of each problem over its samples with a verdict; NaN for a problem with none."""
    scores = _table(scores)
    present = ~np.isnan(scores)
    total = np.where(present, scores, 0.0).sum(axis=1)
    count = present.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def bootstrap_interval(
    means: Float[np.ndarray, "problems"], seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of `means`, problems resampled with replacement.

    NaN ends below two problems: resampling one problem would claim certainty.
    """
    means = np.asarray(means, np.float64)
    if len(means) < 2:
        return np.nan, np.nan
    rng = np.random.default_rng(seed)
    sizes = [min(_CHUNK, resamples - done) for done in range(0, resamples, _CHUNK)]
    draws = np.concatenate([means[rng.integers(len(means), size=(size, len(means)))].mean(axis=1) for size in sizes])
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def average_at_n(scores: Float[np.ndarray, "problems samples"], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """avg@n: the mean over problems of each problem's mean score, with standard error and interval.

    Args:
        scores: NaN for samples without a verdict. A problem with no verdict at all counts nowhere.
        seed: of the bootstrap.
    """
    scores = _table(scores)
    means = problem_means(scores)
    return _estimate(means[~np.isnan(means)], scores, seed, resamples)


def paired_difference(
    first: Float[np.ndarray, "problems samples"],
    second: Float[np.ndarray, "problems samples_of_second"],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Mean of second - first over problems, both runs resampled together.

    Row i of both tables is the same problem; the numbers of samples may differ. The pairing removes the spread of the
    problems' difficulty, so the interval is narrower than the two runs' own intervals suggest. Problems without a
    verdict in either run count nowhere; `samples` and `missing` are those of both runs together.

    Raises:
        ValueError: the tables have different numbers of rows.
    """
    first, second = _table(first), _table(second)
    if len(first) != len(second):
        raise ValueError(f"a paired comparison needs the same problems: {len(first)} rows against {len(second)}")
    difference = problem_means(second) - problem_means(first)
    return _estimate(difference[~np.isnan(difference)], np.concatenate([first, second], axis=1), seed, resamples)


def pass_at_k(correct: Float[np.ndarray, "problems samples"], k: int) -> tuple[float, int]:
    """Unbiased pass@k, 1 - C(n-c, k) / C(n, k) per problem, averaged over problems.

    Chen et al. 2021 (arXiv 2107.03374), eq. 1; as the product of (1 - k/i) over i = n-c+1 .. n, which neither overflows
    nor cancels.

    Args:
        correct: 1 right, 0 wrong, NaN no verdict. n is the number of verdicts of the problem.
        k: at least 1.

    Returns:
        The mean, and the number of problems it is over: those with at least k verdicts. (NaN, 0) if there is none.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    values = []
    for row in _table(correct):
        verdicts = row[~np.isnan(row)]
        n, c = len(verdicts), int(np.count_nonzero(verdicts))
        if n < k:
            continue
        # With fewer than k wrong samples, every choice of k has a right one; the product contains a zero or a negative.
        values.append(1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))))
    return (float(np.mean(values)), len(values)) if values else (np.nan, 0)


def _table(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores have shape {scores.shape}; give [problems, samples] with at least one of each")
    return scores


def _estimate(means: np.ndarray, scores: np.ndarray, seed: int, resamples: int) -> Estimate:
    count = len(means)
    low, high = bootstrap_interval(means, seed, resamples)
    missing = int(np.isnan(scores).sum())
    return Estimate(
        value=float(means.mean()) if count else np.nan,
        standard_error=float(means.std(ddof=1) / np.sqrt(count)) if count > 1 else np.nan,
        low=low,
        high=high,
        problems=count,
        samples=scores.size - missing,
        missing=missing,
    )
