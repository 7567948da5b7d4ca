r"""Cuts text where no bracket is open. Brackets of all kinds count alike: `(1,2]` is one bracket."""

import re

_BRACKET = re.compile(r"\\[{}]|\\langle|\\rangle|\\lfloor|\\rfloor|\\lceil|\\rceil|\\begin|\\end|[(){}\[\]]")
_OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"}


def depths(text: str) -> list[int]:
    """How many brackets are open before each character, and at the end; unpaired ones close nothing."""
    before, depth, position = [], 0, 0
    for bracket in _BRACKET.finditer(text):
        before += [depth] * (bracket.start() - position)
        opens = bracket[0] in _OPENING
        inside = depth + opens if opens else depth
        before += [max(inside, 1)] * len(bracket[0])
        depth = depth + 1 if opens else max(depth - 1, 0)
        position = bracket.end()
    return before + [depth] * (len(text) - position + 1)


def is_balanced(text: str) -> bool:
    """Whether every brace and round or square bracket has a partner, of whichever shape (`(1, 2]`)."""
    depth = braces = 0
    for bracket in re.finditer(r"\\[A-Za-z]+|\\.|[(){}\[\]]", text):
        step = (bracket[0] in "([{") - (bracket[0] in ")]}") if len(bracket[0]) == 1 else 0
        depth += step
        braces += step * (bracket[0] in "{}")
        if depth < 0 or braces < 0:
            return False
    return depth == 0 and braces == 0


def cut(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The pieces of `text` between top-level matches of `separator`, stripped, and what separated them."""
    open_before = depths(text)
    pieces, separators, begin = [], [], 0
    for match in separator.finditer(text):
        if open_before[match.start()] == 0 and match[0]:
            pieces.append(text[begin : match.start()].strip())
            separators.append(match[0].strip())
            begin = match.end()
    return [*pieces, text[begin:].strip()], separators


def unwrapped(text: str, left: str, right: str) -> str | None:
    """The inside of `text` if one pair of brackets encloses all of it, else None."""
    if len(text) < len(left) + len(right) or not (text.startswith(left) and text.endswith(right)):
        return None
    open_before = depths(text)
    if any(open_before[i] == 0 for i in range(len(left), len(text) - len(right) + 1)):
        return None
    return text[len(left) : len(text) - len(right)].strip()
