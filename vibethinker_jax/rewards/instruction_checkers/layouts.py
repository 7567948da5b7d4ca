"""IFBench's formats: lists, quotes, brackets, lines, emoji, italics."""

import itertools
import re
import string
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker
from vibethinker_jax.rewards.instruction_checkers.resources import PUNKT
from vibethinker_jax.rewards.instruction_checkers.text import ends_with_emoji, is_emoji, sentences, straight_quotes

BRACKETS = {"(": ")", "[": "]", "{": "}"}
BRACKET_DEPTH = 5
QUOTE_DEPTH = 3
_BULLET, _SUB_BULLET = re.compile(r"\s*\*\s+\S"), re.compile(r"\s*-\s*[^\s-]")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@checker("format:emoji", needs_official=(PUNKT,))
def emoji(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Every sentence ends with an emoji. Official looks at one of two characters, and at the next sentence's first."""
    found = sentences(text, official)
    if not official:
        return bool(found) and all(ends_with_emoji(sentence) for sentence in found)
    bare = [sentence.translate(_NO_PUNCTUATION).strip() for sentence in found]
    following = [*bare[1:], ""]
    return all(
        now and (any(map(is_emoji, now[-2:])) or is_emoji(after[:1]))
        for now, after in zip(bare, following, strict=True)
    )


@checker("format:line_indent")
def line_indent(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Every line is indented further than the one before, blank lines aside.

    Official skips lines as it drops blank ones, so some stay, and it takes a single line for stairs.
    """
    lines = text.split("\n")
    if official:
        index = 0
        while index < len(lines):
            if not lines[index].strip():
                lines.remove(lines[index])
            index += 1
    else:
        lines = [line.expandtabs() for line in lines if line.strip()]
        if len(lines) < 2:
            return False
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(left < right for left, right in itertools.pairwise(indents))


@checker("format:list")
def separator_list(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """A list whose items start with the separator. Official counts it anywhere, as in "well-known non-fiction"."""
    separator = re.escape(arguments["sep"].strip())
    pattern = separator if official else rf"^[ \t]*{separator}(?!{separator})\s*\w"
    return len(re.findall(pattern, text, re.MULTILINE)) >= 2


@checker("format:newline")
def newline(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Each word on a line of its own. Official compares counts, and so forgives one line for another."""
    if official:
        bare = text.translate(_NO_PUNCTUATION).strip()
        return sum(line != "" for line in bare.split("\n")) == len(bare.split())
    return all(len(line.split()) == 1 for line in text.split("\n") if line.strip())


@checker("format:no_bullets_bullets", needs_official=(PUNKT,))
def sentences_then_bullets(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least two sentences that end in a period, then at least two bullet points with `*`.

    Official counts sentences without a period, and refuses a blank line among the sentences or behind the bullets.
    """
    lines = text.split("\n")
    if official:
        before, bullets, reading = 0, 0, True
        for line in lines:
            if line.strip().startswith("*"):
                reading, bullets = False, bullets + 1
                if before < 2:
                    return False
            elif reading:
                found = len(sentences(line.strip(), official))
                before, reading = before + found, found > 0
            else:
                return False
        return bullets >= 2
    bullets = [index for index, line in enumerate(lines) if _BULLET.match(line)]
    if len(bullets) < 2:
        return False
    before = sentences("\n".join(lines[: bullets[0]]))
    return sum(sentence.rstrip("\"'*_)\u201d").endswith(".") for sentence in before) >= 2


@checker("format:options")
def options(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Exactly one of the options: lettered ones as written, others whatever their case and punctuation.

    Official splits at "or" inside words, and wants no space around a lettered option.
    """
    listed = arguments["options"]
    separator = "/" if "/" in listed else r"or" if official and "or" in listed else r"\s+or\s+"
    if not re.search(separator, listed):
        separator = ","
    permitted = [option.strip() for option in re.split(separator, listed)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", listed):
        return (text if official else text.strip()) in permitted
    around = string.punctuation + (" " if official else string.whitespace + "\u2018\u2019\u201c\u201d")
    given = (text if official else straight_quotes(text)).strip(around).lower()
    return any(option.strip(around).lower() == given for option in permitted)


@checker("format:parentheses")
def parentheses(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Brackets nested at least five deep. Official asks only the innermost pair to be closed."""
    open_brackets: list[list[Any]] = []  # of each open bracket: itself, and the depth of what it holds
    deepest = 0
    for character in text:
        if character in BRACKETS:
            open_brackets.append([character, 0])
            deepest = max(deepest, len(open_brackets))
        elif character in BRACKETS.values():
            if not open_brackets or BRACKETS[open_brackets[-1][0]] != character:
                open_brackets, deepest = [], 0
                continue
            depth = open_brackets.pop()[1] + 1
            if depth >= BRACKET_DEPTH or (official and deepest >= BRACKET_DEPTH):
                return True
            if open_brackets:
                open_brackets[-1][1] = max(open_brackets[-1][1], depth)
    return False


@checker("format:quotes")
def nested_quotes(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Quotes nested at least three deep, double and single in turn. Official takes apostrophes for quotes."""
    if not official:
        text = straight_quotes(text)
    open_quotes: list[list[Any]] = []  # of each open quote: its mark, and the depth of what it holds
    deepest = 0
    for index, character in enumerate(text):
        if open_quotes and character == open_quotes[-1][0] and (official or not _is_apostrophe(text, index)):
            depth = open_quotes.pop()[1] + 1
            if depth >= QUOTE_DEPTH or (official and deepest - len(open_quotes) >= QUOTE_DEPTH):
                return True
            if open_quotes:
                open_quotes[-1][1] = max(open_quotes[-1][1], depth)
        elif character in "\"'" and (official or _may_open_quote(text, index)):
            open_quotes.append([character, 0])
            deepest = max(deepest, len(open_quotes))
    return False


def _is_apostrophe(text: str, index: int) -> bool:
    """An apostrophe inside a word."""
    around = text[max(0, index - 1) : index + 2]
    return text[index] == "'" and len(around) == 3 and around[0].isalnum() and around[2].isalnum()


def _may_open_quote(text: str, index: int) -> bool:
    """A quotation mark opens a quote behind white space, a bracket, a dash or another mark, and before some text."""
    before, after = text[index - 1 : index], text[index + 1 : index + 2]
    return (
        (not before or before.isspace() or before in "\"'([{-\u2013\u2014:*_") and bool(after) and not after.isspace()
    )


@checker("format:quote_unquote")
def quote_unquote(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Every quoted phrase is followed by unquoted words. Official is content with no quote at all."""
    if official:
        squeezed = "".join(text.replace("'\"'", "").split())
        ending = squeezed.strip(string.digits + string.punctuation.replace('"', ""))
        return '""' not in squeezed and not ending.endswith('"')
    parts = straight_quotes(text).replace("'\"'", "").split('"')
    quoted, unquoted = parts[1::2], parts[2::2]
    return len(parts) % 2 == 1 and bool(quoted) and all(re.search(r"\w", part) for part in quoted + unquoted)


@checker("format:sub-bullets")
def sub_bullets(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Bullet points with `*`, each with a sub-bullet point with `-`.

    Official takes any asterisk for a bullet and any hyphen for its sub-bullet, and is content without bullets.
    """
    if official:
        return all("-" in part for part in text.split("*")[1:])
    counts: list[int] = []
    for line in text.split("\n"):
        if _BULLET.match(line):
            counts.append(0)
        elif counts and _SUB_BULLET.match(line):
            counts[-1] += 1
    return bool(counts) and all(counts)


@checker("format:thesis")
def thesis(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Each section starts with a statement in HTML italics that text follows.

    Official looks for one such statement anywhere. Fixed looks at the start of the response, or of every section where
    markdown or HTML headings make sections.
    """
    if official:
        start = next((found for tag in ("<i>", "<em>") if (found := text.find(tag)) >= 0), -1)
        rest = text[start:]
        end = next((found for tag in ("</i>", "</em>") if (found := rest.find(tag)) >= 0), -1)
        return start >= 0 and end >= 0 and bool(rest[3:end].strip()) and bool(rest[end + 4 :].strip())
    heading = r"^[ \t]*(?:#{1,6}[ \t].*|<h[1-6][^>\n]*>.*)$"
    sections = re.split(heading, text, flags=re.MULTILINE)
    if len(sections) > 1:
        sections = sections[1:]  # what stands before the first heading is no section
    statement = re.compile(r"\s*(?:<p>\s*)?<(i|em)>\s*\w.*?</\1>.*?\w", re.DOTALL | re.IGNORECASE)
    return all(statement.match(section) for section in sections)
