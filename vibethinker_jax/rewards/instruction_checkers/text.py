"""Sentences, words, emoji and counts: what several checkers ask of a text."""

import re
import string

from vibethinker_jax.rewards.instruction_checkers.resources import nltk_sentences, nltk_words


def word_set(listed: str) -> frozenset[str]:
    """The words of a list that is written as one text."""
    return frozenset(listed.split())


_EMOJI_BASE = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_EMOJI_JOINERS = "\u200d\ufe0f\u20e3\U000e0020-\U000e007f"
EMOJI = re.compile(f"[{_EMOJI_BASE}][{_EMOJI_BASE}{_EMOJI_JOINERS}]*")
_IS_EMOJI = re.compile(f"[{_EMOJI_BASE}]")

_CLOSERS = "\"'\u201d\u2019)\\]*_"
_SENTENCE_END = re.compile(
    rf"(?:(?P<stop>[.!?\u2026]+)[{_CLOSERS}]*(?=\s|$|[{_EMOJI_BASE}])|[\u3002\uff01\uff1f\u0964]+[\u201d\u2019\u300d]*)"
    rf"(?:\s*[{_EMOJI_BASE}{_EMOJI_JOINERS}])*"
)
_BLOCK_END = re.compile(r"\n\s*\n|\n(?=[ \t]*(?:[-*+\u2022]|#+|\d{1,3}[.)])[ \t])")
_LIST_NUMBER = re.compile(r"\s*[#>*\-]*\s*\d{1,3}")
_ABBREVIATIONS = word_set(
    "al approx apr aug capt cf co corp dec dept dr e.g eg fig gov i.e ie inc jan jr lt ltd mr mrs ms mt"
    " nov oct pp prof rev sen sept sr st viz vol vs"
)
_TOKEN = re.compile(r"\w+(?:['\u2019.-]\w+)*|[^\w\s]")
_STRIPPED = string.punctuation + "\u201c\u201d\u2018\u2019\u2026\u2013\u2014"


def sentences(text: str, official: bool = False) -> list[str]:
    """The sentences of a text.

    Official: NLTK's Punkt model. Otherwise: a sentence ends at `.`, `!`, `?`, an ellipsis or their Chinese, Japanese
    and Indic forms before white space, at a blank line, and before a line that starts a list item or heading. It does
    not end after initials, common abbreviations and list numbers, nor before a lower-case letter in a text that has
    capitals. Emoji behind the end belong to the sentence.
    """
    if official:
        return nltk_sentences(text)
    found = []
    has_capitals = text != text.lower()
    for block in _BLOCK_END.split(text):
        start = 0
        for end in _SENTENCE_END.finditer(block):
            if end["stop"] and not _ends_sentence(block, start, end, has_capitals):
                continue
            found.append(block[start : end.end()])
            start = end.end()
        found.append(block[start:])
    return [sentence.strip() for sentence in found if re.search(r"\w", sentence)]


def _ends_sentence(block: str, start: int, end: re.Match[str], has_capitals: bool) -> bool:
    following = block[end.end() : end.end() + 40].lstrip()[:1]
    if has_capitals and following.islower():
        return False
    if end["stop"] != ".":
        return True
    before = block[start : end.start()]
    if _LIST_NUMBER.fullmatch(before):
        return False
    word = re.split(r"[\s(\[\"'\u201c]", before[-40:])[-1]
    return not ((len(word) == 1 and word.isupper() and word != "I") or word.lower() in _ABBREVIATIONS)


def tokens(text: str, official: bool = False) -> list[str]:
    """Words and punctuation marks, each a token. Official: as NLTK's `word_tokenize`."""
    return nltk_words(text) if official else _TOKEN.findall(text)


def words(text: str, official: bool = False) -> list[str]:
    """The tokens with a letter or a digit."""
    return [token for token in tokens(text, official) if any(character.isalnum() for character in token)]


def plain_words(text: str) -> list[str]:
    """Lower-case words at white space, all ASCII punctuation dropped."""
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def stripped(word: str) -> str:
    """A word without the punctuation around it."""
    return word.strip(_STRIPPED + " ")


def word_count(text: str) -> int:
    r"""Number of runs of letters, digits and underscores, as both benchmarks count words."""
    return len(re.findall(r"\w+", text))


def occurrences(phrase: str, text: str) -> int:
    """How often a phrase stands in a text as whole words, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.IGNORECASE))


def holds(count: int, relation: str, wanted: float) -> bool:
    """Whether `count` is "at least" or "less than" `wanted`."""
    return count >= wanted if relation == "at least" else count < wanted


def is_emoji(character: str) -> bool:
    return _IS_EMOJI.fullmatch(character) is not None


def ends_with_emoji(text: str) -> bool:
    """Whether a sentence ends with an emoji, punctuation aside."""
    bare = re.sub(rf"[{re.escape(_STRIPPED)}\s\u3002\uff01\uff1f\u0964]+$", "", text)
    tail = bare[-16:]
    return bool(tail) and any(match.end() == len(tail) for match in EMOJI.finditer(tail))


def straight_quotes(text: str) -> str:
    """The text with typographic quotation marks and apostrophes replaced by ASCII ones."""
    return re.sub("[\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d]", '"', re.sub("[\u2018\u2019]", "'", text))
