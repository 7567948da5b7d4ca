"""Checkers of single instructions, by instruction type: `CHECKERS[type].follows(response, arguments, official)`.

The types and their arguments are those of IFEval (arXiv 2311.07911, google-research/instruction_following_eval) and
IFBench (arXiv 2507.02833, allenai/IFBench at 1d62c1d6); the code is our own. Two behaviours:

- `official` scores as those repositories do, errors included: for comparison with published figures.
- `fixed` (not official) differs where they are wrong, so that training cannot learn the error. Each checker's
  docstring says how; without a remark the two agree, except for the split into sentences and words: official uses
  NLTK's models and fixed the rules of `text.py`, which need no data.
"""

from vibethinker_jax.rewards.instruction_checkers import (
    cases,
    counts,
    formats,
    keywords,
    layouts,
    lengths,
    repetitions,
)
from vibethinker_jax.rewards.instruction_checkers.registry import CHECKERS, Checker

__all__ = ["CHECKERS", "Checker", "cases", "counts", "formats", "keywords", "layouts", "lengths", "repetitions"]
