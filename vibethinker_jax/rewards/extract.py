"""Where the final answer stands in the text of a response. Pure string work, linear in the text."""

import re

from vibethinker_jax.rewards.numbers import number

MAX_ANSWER_CHARS = 1000  # longer "answers" are essays; real ones (matrices, long sets) stay under 300
MAX_BARE_CHARS = 200  # of a response that is nothing but its answer
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{?)")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is part of a set, not of a group
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(\S.*?)[ \t\r]*$", re.MULTILINE)
_STATED = re.compile(r"\banswer\s*(?:\*\*)?\s*(?:is|equals|:|=)(?:\s+equal\s+to)?[\s:*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|[;!?](?=\s|$)|,?\s+(?:because|since|which|so|as)\b|\n")
_WORD = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]{3,}(?![A-Za-z])")
_NUMERAL = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_ALTERNATIVE = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`), nested braces kept.

    None without any box; the empty string when the last box is empty, never closed (a truncated response) or closed
    only after `MAX_ANSWER_CHARS`: an earlier box is then not a substitute, it was not the final answer.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opening = _BOX.match(text, start)
    if opening is None or not opening.group(1):  # `\boxed 7`: TeX boxes the next token
        rest = text[start:].split(maxsplit=2)
        return rest[1].rstrip("$.,;") if len(rest) > 1 else ""
    depth, begin = 1, opening.end()
    for brace in _BRACE_OR_ESCAPE.finditer(text, begin, begin + MAX_ANSWER_CHARS + 1):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[begin : brace.start()].strip()
    return ""


def last_hashes(text: str) -> str | None:
    """`x` of the last `#### x` line, GSM8K's form of an answer; None if there is none.

    Markdown has headings of four hashes too. A line counts if it is the last one with text, or if `x` is a number.
    """
    lines = list(_HASHES.finditer(text)) if "####" in text else []
    if not lines:
        return None
    answer = lines[-1].group(1)
    if text[lines[-1].end() :].strip() and number(answer) is None:
        return None
    return answer


def last_statement(text: str) -> str | None:
    """What the last "the answer is ..." or "Answer: ..." states, to the end of its sentence; None without one."""
    starts = list(_STATED.finditer(text))
    if not starts:
        return None
    rest = text[starts[-1].end() :][: MAX_ANSWER_CHARS + 1]
    end = _SENTENCE_END.search(rest)
    return (rest[: end.start()] if end else rest).strip().strip("*").strip() or None


def bare_answer(text: str) -> str | None:
    """The text itself if it is one short line without a sentence in it: a response that is nothing but its answer."""
    text = text.strip()
    if not text or "\n" in text or len(text) > MAX_BARE_CHARS or len(_WORD.findall(text)) > 1:
        return None
    return text


def final_answer(text: str) -> str | None:
    r"""The stated final answer, None if it has none of the known forms.

    The last `\boxed{}`, else the last `#### x`, else the last "answer is x", else a text that is nothing else. An
    earlier answer never stands in for a later one.
    """
    for form in (last_box, last_hashes, last_statement, bare_answer):
        answer = form(text)
        if answer is not None:
            return answer
    return None


def offers_several(text: str) -> bool:
    """Whether the last line of a text without a stated answer names several numbers to choose from: `7 or 8`."""
    line = text.rstrip().rpartition("\n")[2]
    return bool(_ALTERNATIVE.search(line)) and len(_NUMERAL.findall(line)) > 1
