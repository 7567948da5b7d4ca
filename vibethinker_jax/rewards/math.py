r"""Mathematical answers: `{"kind": "math", "answer": "\\frac{1}{2}"}`.

What counts as an answer, in this order: the last `\boxed{}`, the last `#### x`, and for text with neither form whatever
math-verify extracts from its end. What counts as equal:

- The same text, spaces aside.
- Integer gold, number literal in the response: exact integer comparison (`numbers.number` lists the accepted forms).
- Everything else: math-verify, called with the gold answer first. Its comparison is asymmetric on purpose, and the
  reversed call rewards any answer to an empty gold.

A prediction that would exhaust the parser (`numbers.hazard`) is wrong before it is parsed: against a gold answer of
that kind, only the same text is right. Parsed expressions are never printed, logged or sent: converting one to text can
take forever.
"""

from collections.abc import Mapping
from typing import Any

from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import Verdict, Verifier, refuse_unknown_keys, register
from vibethinker_jax.rewards.extract import MAX_ANSWER_CHARS, final_answer, last_box
from vibethinker_jax.rewards.numbers import contradiction, hazard, number, strip_delimiters
from vibethinker_jax.rewards.thinking import answer_text

TAIL_CHARS = 2000  # of an answer with no stated form, the part that math-verify searches


def gold_text(spec: Mapping[str, Any]) -> str:
    """The gold answer of a verifier entry as bare LaTeX: no box, no math delimiters, no full stop."""
    gold = str(spec["answer"])
    gold = strip_delimiters(last_box(gold) or gold)
    # "$3$ and $5$" is one answer with two values; inside a box the inner delimiters would only confuse the parser.
    return gold.replace(r"\$", "\0").replace("$", "").replace("\0", r"\$")


def _squeeze(text: str) -> str:
    return "".join(text.split())


@register("math")
class MathVerifier(Verifier):
    """See the module docstring."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        answer = spec.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise UserError(f"{where}: verifier.answer is {answer!r}; give the gold answer as a non-empty string")
        if not gold_text(spec):
            raise UserError(
                f"{where}: verifier.answer is {answer!r}, empty inside its delimiters; give the gold answer"
            )
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
        gold = gold_text(spec)
        if not strip_delimiters(answer):
            return Verdict.binary(False, None, "the last box is empty, overlong or not closed")
        if _squeeze(strip_delimiters(answer)) == _squeeze(gold):
            return Verdict.binary(True, answer, "same text as the gold answer")
        gold_number, answer_number = number(gold), number(answer)
        if gold_number is not None and gold_number.denominator == 1 and answer_number is not None:
            return Verdict.binary(answer_number == gold_number, answer, f"number compared with {gold_number}")
        shown = answer if len(answer) <= MAX_ANSWER_CHARS else answer[:MAX_ANSWER_CHARS] + "…"
        refusal = hazard(answer)
        if refusal is not None:
            return Verdict.binary(False, shown, f"refused unparsed: {refusal}")
        falsehood = contradiction(answer) if "=" not in gold else None
        if falsehood is not None:
            return Verdict.binary(False, shown, f"false equation: {falsehood}")
        return None

    def warm_up(self) -> None:
        import logging

        import math_verify

        # math-verify warns that its own alarm-based time limit is off: the worker's limits replace it. It must be off,
        # because the alarm counts time in which a busy host let us wait, and works in main threads only.
        for name in ("math_verify", "latex2sympy2_extended"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        half = math_verify.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)
        if not math_verify.verify(
            half, math_verify.parse(r"\boxed{\frac{2}{4}}", parsing_timeout=None), timeout_seconds=None
        ):
            raise RuntimeError("math-verify cannot compare 1/2 with 2/4: its parser is not working")

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        decided = self.decide(spec, response)
        if decided is not None:
            return decided
        from math_verify import parse, verify

        text = answer_text(response, spec.get("require_thinking", False))
        answer = final_answer(text)
        source = text[-TAIL_CHARS:] if answer is None else rf"\boxed{{{answer}}}"
        prediction = parse(source, parsing_timeout=None)
        if answer is None:
            # math-verify appends the text it matched; anything else in the list is an expression, never to be printed
            answer = next((item for item in prediction if isinstance(item, str)), None)
        if not prediction:
            return Verdict.binary(False, answer, "no answer found" if answer is None else "unreadable answer")
        gold = parse(rf"\boxed{{{gold_text(spec)}}}", parsing_timeout=None)
        if not gold:
            return Verdict.failed(f"math-verify cannot read the gold answer {gold_text(spec)[:80]!r}; mend the problem")
        return Verdict.binary(bool(verify(gold, prediction, timeout_seconds=None)), answer, "compared by math-verify")
