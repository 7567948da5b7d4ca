"""Where the final answer stands in the text of a response. Pure string work, linear in the text."""

import re

from vibethinker_jax.rewards.numbers import number

MAX_ANSWER_CHARS = 1000  # longer "answers" are essays; real ones (matrices, long sets) stay under 300
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{?)")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is part of a set, not of a group
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(\S.*?)[ \t\r]*$", re.MULTILINE)


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


def final_answer(text: str) -> str | None:
    r"""The stated final answer: the last `\boxed{}`, else the last `#### x`, else None (no stated form)."""
    boxed = last_box(text)
    return boxed if boxed is not None else last_hashes(text)
