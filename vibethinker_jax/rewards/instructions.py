"""Verifiable instructions: `{"kind": "instructions", "instruction_ids": ["punctuation:no_comma"], "kwargs": [{}]}`.

Types and arguments are those of IFEval and IFBench (`data/instruction_kwargs.py`), each with its checker in
`instruction_checkers/`. Two optional fields of the verifier say how a response is scored:

- `scoring`: "strict" (default) takes the response as it is; "loose" also tries it without its first line, last line or
  both, each with and without asterisks, and accepts an instruction that any of these eight texts follows.
- `checkers`: "fixed" (default), or "official" for the behaviour of the public repositories, errors included.

`correct` is the prompt-level figure of both benchmarks: all instructions followed. The reward is the same, 1 or 0, and
no share: MGPO counts binary rewards (report eq. 1), and a share would pay for ignoring a prompt's hardest instruction.
`followed` gives the verdict on each instruction, for the instruction-level figures.
"""

from collections.abc import Mapping
from typing import Any

from vibethinker_jax.data.instruction_kwargs import check_instructions
from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import Verdict, Verifier, refuse_unknown_keys, register
from vibethinker_jax.rewards.instruction_checkers import CHECKERS
from vibethinker_jax.rewards.thinking import answer_text

SCORINGS = ("strict", "loose")
BEHAVIOURS = ("fixed", "official")


def followed(spec: Mapping[str, Any], text: str, scoring: str | None = None, checkers: str | None = None) -> list[bool]:
    """Which instructions of a verifier entry a text follows.

    Args:
        spec: a checked verifier entry.
        text: the response without its thinking. A blank one follows nothing.
        scoring: "strict" or "loose"; default: what the entry says.
        checkers: "fixed" or "official"; default: what the entry says.

    Returns:
        For each of `instruction_ids`, whether it is followed.
    """
    official = (checkers or spec.get("checkers", "fixed")) == "official"
    loose = (scoring or spec.get("scoring", "strict")) == "loose"
    texts = [variant for variant in (loose_variants(text) if loose else [text]) if variant.strip()]
    return [
        any(CHECKERS[identifier].follows(variant, arguments, official) for variant in texts)
        for identifier, arguments in zip(spec["instruction_ids"], spec["kwargs"], strict=True)
    ]


def loose_variants(text: str) -> list[str]:
    """IFEval's eight texts for loose scoring: lines dropped at either end or not, asterisks dropped or not."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [variant.replace("*", "") for variant in cut]


@register("instructions")
class InstructionsVerifier(Verifier):
    """See the module docstring. Checks run in a worker: patterns of official scoring can take quadratic time."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        refuse_unknown_keys(spec, {"instruction_ids", "kwargs", "scoring", "checkers"}, where)
        ids, kwargs = spec.get("instruction_ids"), spec.get("kwargs")
        for name, value in (("instruction_ids", ids), ("kwargs", kwargs)):
            if not isinstance(value, list | tuple) or not value:
                raise UserError(f"{where}: verifier.{name} is {value!r}; write a list with one item per instruction")
        if len(ids) != len(kwargs):
            raise UserError(f"{where}: verifier.kwargs has {len(kwargs)} items; write one for each of {list(ids)}")
        for name, permitted in (("scoring", SCORINGS), ("checkers", BEHAVIOURS)):
            if spec.get(name, permitted[0]) not in permitted:
                raise UserError(f"{where}: verifier.{name} is {spec[name]!r}; use one of {', '.join(permitted)}")
        check_instructions(ids, kwargs, where)
        for identifier in ids:
            missing = CHECKERS[identifier].missing(official=spec.get("checkers") == "official")
            if missing is not None:
                raise UserError(f"{where}: {identifier} cannot be checked: {missing}")

    def decide(self, spec: Mapping[str, Any], response: str) -> Verdict | None:
        text = answer_text(response, spec.get("require_thinking", False))
        if text is None:
            return Verdict.binary(False, None, "no answer outside the thinking")
        return None if text.strip() else Verdict.binary(False, None, "empty answer")

    def warm_up(self) -> None:
        from vibethinker_jax.rewards.instruction_checkers.resources import LANGDETECT, detected_language

        if LANGDETECT.missing() is None and detected_language("It takes a second to load the languages.") != "en":
            raise RuntimeError("langdetect does not know English: it is not working")

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        decided = self.decide(spec, response)
        if decided is not None:
            return decided
        verdicts = followed(spec, answer_text(response, spec.get("require_thinking", False)))
        failed = [identifier for identifier, ok in zip(spec["instruction_ids"], verdicts, strict=True) if not ok]
        detail = f"{sum(verdicts)} of {len(verdicts)} instructions followed"
        return Verdict.binary(not failed, None, detail + (f"; not: {', '.join(failed)}" if failed else ""))
