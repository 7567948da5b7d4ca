r"""Multiple choice: `{"kind": "choice", "options": ["red", "green"], "answer": "B"}`, options in the prompt's order.

What counts as an answer, in this order: the boxes, the last "Answer: B" (also "the answer is B"), the last line. Read
as the choice of an option: its letter (`B`, `(b)`, `B.`, `\text{B}`, `**B**`, "option B"), its text, or both.

Several letters, a letter with the text of another option, boxes that disagree, and a box that a later "Answer:" line
contradicts are wrong, whatever the gold. Problems should be rendered (`vt.render`): in files, the gold often is A.
"""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from vibethinker_jax.errors import UserError
from vibethinker_jax.rewards.base import Verdict, Verifier, refuse_unknown_keys, register
from vibethinker_jax.rewards.thinking import answer_text

MAX_OPTIONS = len(string.ascii_uppercase)
MAX_CHARS = 1000  # of a text that names an option
MAX_BOXES = 50  # a response with more of them guesses
SEVERAL = "several"  # what `chosen` gives for an answer that names more than one option

_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATEMENT = re.compile(
    r"\b(?:answer|choice|option)s?\b(?:\s+(?:choice|letter|option))?[*_]*\s*(?:is\b|are\b|:|=)[*_]*\s*:?(?P<what>[^\n]*)",
    re.IGNORECASE,
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|rm|bf|boxed)\s*\{([^{}]*)\}")
# A letter counts as a label before punctuation, a bracket, a dash or a reason; "A large increase" has none.
_LABEL = (
    r"[(\[]?(?P<letter>[A-Z])(?:[)\].:,;](?=\s|$)|[)\]]|(?=\s+(?:because|since|as|for)\s)|(?=\s*[-\u2013\u2014(])|$)"
)
_LABELLED = re.compile(rf"(?i:the\s+)?(?i:option|choice|answer|letter)?\s*{_LABEL}\s*(?P<rest>.*)", re.DOTALL)
_LETTER_LIST = re.compile(r"[(\[]?[A-Z][)\].:]*(?:(?:,|/|&|\+|;|\band\b|\bor\b|\s)+[(\[]?[A-Z][)\].:]*)+\W*")
_MORE_LETTERS = re.compile(r"\W*(?:and|or|/|&|\+|,)+\W*(?:option|choice)?\s*[(\[]?[A-Z](?:\W|$)")


@register("choice")
class ChoiceVerifier(Verifier):
    """See the module docstring. String work only: no response reaches a worker."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        refuse_unknown_keys(spec, {"options", "answer"}, where)
        options, answer = spec.get("options"), spec.get("answer")
        usable = isinstance(options, list | tuple) and all(isinstance(o, str) and o.strip() for o in options)
        if not usable or not 2 <= len(options) <= MAX_OPTIONS:
            raise UserError(f"{where}: verifier.options is {options!r}; list 2 to {MAX_OPTIONS} non-empty texts")
        if len({option.strip() for option in options}) < len(options):
            raise UserError(f"{where}: verifier.options is {options!r}; make the options distinct")
        letters = string.ascii_uppercase[: len(options)]
        if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
            raise UserError(f"{where}: verifier.answer is {answer!r}; write the letter of an option: {letters}")

    def decide(self, spec: Mapping[str, Any], response: str) -> Verdict:
        text = answer_text(response, spec.get("require_thinking", False))
        if text is None:
            return Verdict.binary(False, None, "no answer outside the thinking")
        if not text.strip():
            return Verdict.binary(False, None, "empty answer")
        options = spec["options"]
        where, stated = _stated(text, options)
        if not stated:
            return Verdict.binary(False, None, f"{where} names no option")
        if SEVERAL in stated or len(stated) > 1:
            return Verdict.binary(False, None, f"{where} names several options")
        (letter,) = stated
        return Verdict.binary(letter == spec["answer"], letter, f"{where} names {letter}, gold is {spec['answer']}")

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        return self.decide(spec, response)


def _stated(text: str, options: Sequence[str]) -> tuple[str, set[str]]:
    """Where the answer stands, for humans, and the letters (or `SEVERAL`) it states; an empty set if unreadable."""
    boxes, after_boxes = _boxes(text, _longest(options))
    statement = max(_STATEMENT.finditer(text), key=re.Match.start, default=None)  # the last one counts
    if boxes is None:
        return "the boxes", {SEVERAL}
    if boxes:
        stated = {chosen(box, options) for box in boxes}
        if None in stated:  # an unreadable last box is no answer; earlier unreadable ones are intermediate results
            stated = stated - {None} if chosen(boxes[-1], options) else set()
        later = chosen(statement["what"], options) if statement and statement.start() >= after_boxes else None
        return "the box", stated | ({later} if stated and later else set())
    if statement is not None:
        letter = chosen(statement["what"], options)
        if letter is not None:
            return "the answer statement", {letter}
    last_line = text.rstrip().rpartition("\n")[2]
    letter = chosen(last_line, options)
    return "the last line", {letter} if letter else set()


def _longest(options: Sequence[str]) -> int:
    return max(MAX_CHARS, 2 * max(map(len, options)))


def _boxes(text: str, longest: int) -> tuple[list[str] | None, int]:
    """Contents of all boxes and the end of the last; None for too many; an unclosed box has the empty content."""
    starts = [match.end() for match in _BOX_START.finditer(text)]
    if len(starts) > MAX_BOXES:
        return None, len(text)
    contents, end = [], 0
    for start in starts:
        depth, content = 1, ""
        for index in range(start, min(len(text), start + longest)):
            depth += (text[index] == "{") - (text[index] == "}")
            if depth == 0:
                content, end = text[start:index], index
                break
        contents.append(content)
    return contents, end


def chosen(candidate: str, options: Sequence[str]) -> str | None:
    """The letter of the option that a short text names; `SEVERAL` for more than one; None for none.

    Args:
        candidate: the content of a box, or a line.
        options: texts of the options, in the order of their letters.
    """
    plain = _bare(candidate) if len(candidate) <= _longest(options) else ""
    if not plain:
        return None
    letters = string.ascii_uppercase[: len(options)]
    # A lower-case letter may be an option's text: GPQA has a question with the options "a" to "d".
    if len(plain) == 1 and plain.upper() in letters and (plain in letters or plain not in options):
        return plain.upper()
    by_text = _same_text(plain, options)
    if by_text is not None:
        return by_text
    if len(plain) <= 100 and _LETTER_LIST.fullmatch(plain) and set(re.findall(r"[A-Z]", plain)) <= set(letters):
        named = set(re.findall(r"[A-Z]", plain))
        return SEVERAL if len(named) > 1 else named.pop()
    if re.fullmatch(r"[A-Z]{2,}", plain) and set(plain) <= set(letters):
        return SEVERAL
    labelled = _LABELLED.fullmatch(plain)
    if labelled is None or labelled["letter"] not in letters:
        return None
    letter, rest = labelled["letter"], labelled["rest"]
    if _MORE_LETTERS.match(rest[:30]):
        return SEVERAL
    quoted = _same_text(rest, options)
    return SEVERAL if quoted not in (None, letter) else letter


def _bare(text: str) -> str:
    """Without markup, math delimiters, enclosing brackets and a final full stop."""
    text = text.strip()
    for _ in range(3):
        text = _WRAPPER.sub(r"\1", text)
        text = text.strip().strip("*_`").strip("$").strip()
        for left, right in (("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"), ("[", "]"), ('"', '"'), ("“", "”")):
            inner = text[len(left) : len(text) - len(right)]
            if len(text) > 2 and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner.strip()
        text = text.removesuffix(".").strip()
    return text


def _same_text(text: str, options: Sequence[str]) -> str | None:
    """The letter of the one option with this text. Case and spaces matter only where they tell options apart."""
    for form in (_squeezed, lambda item: _squeezed(item).casefold()):
        wanted = form(text)
        if not wanted:
            return None
        found = [index for index, option in enumerate(options) if form(option) == wanted]
        if len(found) == 1:
            return string.ascii_uppercase[found[0]]
        if found:
            return SEVERAL
    return None


def _squeezed(text: str) -> str:
    text = unicodedata.normalize("NFC", _bare(text))
    text = text.replace("\\,", "").replace("\\ ", "").replace("\u2212", "-").replace("$", "")
    return "".join(text.split())
