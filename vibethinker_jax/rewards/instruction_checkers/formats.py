"""IFEval's formats and contents: bullets, highlights, sections, titles, JSON, placeholders, postscripts."""

import json
import re
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.instruction_checkers.registry import checker

CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_RULE = re.compile(r"\s*(?:[*_-]\s*){3,}")  # a markdown divider, no bullet
_ITALIC = re.compile(r"(?<!\*)\*(?![\s*])[^\n*]*(?<!\s)\*(?!\*)")


@checker("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """Exactly so many bullet points with `*` or `-`. Official counts dividers such as `---` too."""
    if official:
        count = len(re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)) + len(
            re.findall(r"^\s*-.*$", text, re.MULTILINE)
        )
    else:
        lines = [line for line in text.split("\n") if not _RULE.fullmatch(line)]
        count = sum(bool(re.match(r"\s*[*-]\s+\S", line)) for line in lines)
    return count == arguments["num_bullets"]


@checker("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many `*highlights*`. Official counts `**bold**` and products such as `2 * 3 * 4` too."""
    if official:
        single = [part for part in re.findall(r"\*[^\n\*]*\*", text) if part.strip("*").strip()]
        double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", text) if part[2:-2].strip()]
        return len(single) + len(double) >= arguments["num_highlights"]
    return len(_ITALIC.findall(text)) >= arguments["num_highlights"]


@checker("detectable_format:multiple_sections")
def multiple_sections(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many sections, marked as "Section 1". Official counts a mention inside a sentence as a section."""
    marker = arguments["section_spliter"].strip()
    if official:
        count = len(re.split(rf"\s?{marker}\s?\d+\s?", text)) - 1
    else:
        marks = rf"^[ \t#>*_\"(\[]*{re.escape(marker)}\s*(?:\d+|[IVXLC]+\b|[A-Z]\b)"
        count = len(re.findall(marks, text, re.MULTILINE))
    return count >= arguments["num_sections"]


@checker("detectable_format:title")
def title(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """A title in double angular brackets, `<<title>>`."""
    return any(found.strip("<>").strip() for found in re.findall(r"<<[^\n]+>>", text))


@checker("detectable_format:json_format")
def json_format(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """The whole response is JSON, in a code fence or bare. Official accepts `5`; fixed wants an object or a list."""
    fenced = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip())
    try:
        value = json.loads(fenced.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return official or isinstance(value, dict | list)


@checker("detectable_format:constrained_response")
def constrained_response(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """One of the three permitted answers. Official accepts a response that gives all of them."""
    given = sum(answer in text for answer in CONSTRAINED_ANSWERS)
    return given > 0 if official else given == 1


@checker("detectable_content:number_placeholders")
def number_placeholders(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """At least so many placeholders such as `[name]`. Official counts `[]` and markdown links too."""
    pattern = r"\[.*?\]" if official else r"\[[^\[\]\n]*\w[^\[\]\n]*\](?!\()"
    return len(re.findall(pattern, text)) >= arguments["num_placeholders"]


@checker("detectable_content:postscript")
def postscript(text: str, arguments: Mapping[str, Any], official: bool) -> bool:
    """A postscript that starts with the marker, "P.S." or "P.P.S".

    Official finds it anywhere in a line, and "P.S." in "P.P.S.". Fixed wants it to start a line and to say something.
    """
    marker = arguments["postscript_marker"].strip()
    if official:
        known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
        pattern = known.get(marker, rf"\s*{marker.lower()}.*$")
        return re.search(pattern, text.lower(), re.MULTILINE) is not None
    letters = r"\.?\s?".join(re.escape(letter) for letter in marker.replace(".", "").replace(" ", ""))
    return re.search(rf"^[ \t*_#>\"]*{letters}\b[.:,\s*_-]*\w", text, re.MULTILINE | re.IGNORECASE) is not None
