r"""Mathematical answers: `{"kind": "math", "answer": "\\frac{1}{2}"}`.

The answer of a response is found by `extract.final_answer`; only for text without any stated form does math-verify
search the end of it. `exact/policy.py` says what counts as equal, as a table.

Three layers decide, cheapest first: number literals are compared as integers; `exact/compare.py` reads structure and
rational arithmetic, in the calling process; what is left (roots, functions, letters) goes to a worker, where
`exact/algebra.py` evaluates what math-verify's parser reads. Expressions that would exhaust it (`exact/refusal.py`) are
wrong before anything reads them: only the same text as the gold answer is right.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import Verdict, Verifier, refuse_unknown_keys, register
from vibethinker_jax.rewards.exact.compare import Comparison
from vibethinker_jax.rewards.exact.refusal import refusal
from vibethinker_jax.rewards.exact.split import is_balanced
from vibethinker_jax.rewards.exact.text import normalise, squeeze
from vibethinker_jax.rewards.extract import MAX_ANSWER_CHARS, final_answer, last_box, offers_several
from vibethinker_jax.rewards.numbers import number, strip_delimiters
from vibethinker_jax.rewards.thinking import answer_text

TAIL_CHARS = 2000  # of an answer with no stated form, the part that math-verify searches
_DANGLING = re.compile(r"(?:[+\-*/^_=<>,]|\\(?:frac|sqrt|binom|cdot|times|pm|cup|le|ge|ne|in))$|^[*/^_=<>,]")
_EMPTY_ARGUMENT = re.compile(r"\\(?:frac|binom|sqrt)(?:\s*\[[^\]]*\])?(?:\{[^{}]*\})?\s*\{\s*\}")


def gold_text(spec: Mapping[str, Any]) -> str:
    """The gold answer of a verifier entry as bare LaTeX: no box, no math delimiters, no full stop."""
    gold = str(spec["answer"])
    return strip_delimiters(last_box(gold) or gold)


@functools.lru_cache(maxsize=4096)
def _flaw(gold: str) -> str | None:
    """Why a gold answer cannot be one; None if it can."""
    text = normalise(gold)
    if not re.search(r"[^\s{}()\[\]|$.,;:]", text):
        return "is empty inside its delimiters"
    if len(gold) > MAX_ANSWER_CHARS:
        return f"is longer than {MAX_ANSWER_CHARS} characters, which no response can state"
    if not is_balanced(text):
        return "has brackets without partners"
    if _DANGLING.search(text):
        return "begins or ends with an operator that has nothing to act on"
    if _EMPTY_ARGUMENT.search(text):
        return "has a command with an empty argument"
    return None


@register("math")
class MathVerifier(Verifier):
    """See the module docstring."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        answer = spec.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise UserError(f"{where}: verifier.answer is {answer!r}; give the gold answer as a non-empty string")
        flaw = _flaw(gold_text(spec))
        if flaw is not None:
            raise UserError(f"{where}: verifier.answer is {_shown(str(answer))!r}, which {flaw}; give the gold answer")
        refuse_unknown_keys(spec, {"answer"}, where)

    def decide(self, spec: Mapping[str, Any], response: str) -> Verdict | None:
        text = answer_text(response, spec.get("require_thinking", False))
        if text is None:
            return Verdict.binary(False, None, "no answer outside the thinking")
        if not text.strip():
            return Verdict.binary(False, None, "empty answer")
        answer = final_answer(text)
        if answer is None:
            return None
        if not strip_delimiters(answer):
            return Verdict.binary(False, None, "the last box is empty, overlong or not closed")
        return _compared(gold_text(spec), answer, None)

    def warm_up(self) -> None:
        import logging

        from vibethinker_jax.rewards.exact import algebra

        # math-verify warns that its own alarm-based time limit is off: the worker's limits replace it. It must be off,
        # because the alarm counts time in which a busy host let us wait, and works in main threads only.
        for name in ("math_verify", "latex2sympy2_extended"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if not algebra.equal(r"\sqrt{2}", r"\frac{2}{\sqrt{2}}") or not algebra.same_by_math_verify("2x > 4", "x > 2"):
            raise RuntimeError(
                "math-verify cannot compare two forms of the square root of 2: its parser is not working"
            )

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        decided = self.decide(spec, response)
        if decided is not None:
            return decided
        from vibethinker_jax.rewards.exact import algebra

        text = answer_text(response, spec.get("require_thinking", False)) or ""
        answer = final_answer(text)
        if answer is None:
            if offers_several(text):
                return Verdict.binary(False, None, "several answers to choose from")
            answer = _searched(text[-TAIL_CHARS:])
        if answer is None:
            return Verdict.binary(False, None, "no answer found")
        verdict = _compared(gold_text(spec), answer, algebra)
        return verdict or Verdict.binary(False, _shown(answer), "not comparable")


def _searched(text: str) -> str | None:
    """The text of the answer that math-verify finds; anything else in its list must never be printed."""
    from math_verify import parse

    return next((item for item in parse(text, parsing_timeout=None) if isinstance(item, str) and item.strip()), None)


def _compared(gold: str, answer: str, algebra: Any) -> Verdict | None:
    """The verdict on an extracted answer; None where only algebra can tell and none is given."""
    gold_number, answer_number = number(gold), number(answer)
    if gold_number is not None and gold_number.denominator == 1 and answer_number is not None:
        return Verdict.binary(answer_number == gold_number, _shown(answer), f"number compared with {gold_number}")
    one, other = normalise(gold), normalise(answer[: MAX_ANSWER_CHARS + 1])
    if squeeze(one) == squeeze(other):
        return Verdict.binary(True, _shown(answer), "same text as the gold answer")
    refused = refusal(answer)
    if refused is not None:
        return Verdict.binary(False, _shown(answer), f"refused unread: {refused}")
    if refusal(gold) is not None:
        return Verdict.binary(False, _shown(answer), "another text than a gold answer too large to compute")
    comparison = Comparison(algebra)
    outcome = comparison.texts(one, other)
    if outcome is None:
        return None
    if outcome:
        return Verdict.binary(True, _shown(answer), "equal by exact rules" if algebra is None else "equal by algebra")
    if comparison.unreadable_gold is not None:
        unread = comparison.unreadable_gold[:80]
        return Verdict.failed(f"math-verify cannot read {unread!r} of the gold answer; mend the problem")
    return Verdict.binary(False, _shown(answer), f"not equal: {comparison.reason or 'the values differ'}")


def _shown(answer: str) -> str:
    return answer if len(answer) <= MAX_ANSWER_CHARS else answer[:MAX_ANSWER_CHARS] + "…"
