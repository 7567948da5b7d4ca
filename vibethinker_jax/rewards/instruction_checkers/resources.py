"""What some checkers need beyond Python: langdetect, and for official scoring NLTK with its data, given by a path.

Nothing is downloaded. What is absent is a named error, never a verdict.
"""

import functools
import importlib.util
import os
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LANGUAGE_SEED = 0
_lock = threading.Lock()


@dataclass(frozen=True)
class Resource:
    """A package or data file; `missing` says what is absent and what to do, or None."""

    name: str
    missing: Callable[[], str | None]


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _missing_langdetect() -> str | None:
    return None if _installed("langdetect") else "the package langdetect is not installed; install the extra `instruct`"


def nltk_file(relative: str) -> pathlib.Path | None:
    """A file or folder of NLTK's data under one of the folders that NLTK_DATA lists; None if absent."""
    folders = [folder for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder]
    return next((path for folder in folders if (path := pathlib.Path(folder) / relative).exists()), None)


def _missing_nltk_file(relative: str) -> str | None:
    if nltk_file(relative) is not None:
        return None
    return f"NLTK's {relative} is absent; set NLTK_DATA to a folder that has it, or use checkers 'fixed'"


def _missing_punkt() -> str | None:
    if not _installed("nltk"):
        return "the package nltk is not installed; pip install nltk, or use checkers 'fixed'"
    return _missing_nltk_file("tokenizers/punkt_tab/english")


LANGDETECT = Resource("langdetect", _missing_langdetect)
PUNKT = Resource("punkt_tab", _missing_punkt)
STOP_WORDS = Resource("stopwords", lambda: _missing_nltk_file("corpora/stopwords/english"))


@functools.cache
def _language_profiles() -> Any:
    """langdetect's factory, its profiles loaded in sorted order.

    `langdetect.detect` loads them as the file system lists them. That order is the order of terms in its sums and
    the breaker of ties, so with a seed alone two machines still disagree.
    """
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    paths = sorted(path for path in pathlib.Path(PROFILES_DIRECTORY).iterdir() if not path.name.startswith((".", "_")))
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in paths])
    factory.set_seed(LANGUAGE_SEED)
    return factory


def detected_language(text: str) -> str | None:
    """langdetect's code of the language, the same on every machine; None where it finds no feature of any."""
    from langdetect import LangDetectException

    with _lock:
        detector = _language_profiles().create()
    detector.append(text)
    try:
        language = detector.detect()
    except LangDetectException:
        return None
    return None if language == "unknown" else language


@functools.cache
def _punkt() -> Any:
    import nltk
    from nltk.tokenize.punkt import PunktTokenizer

    nltk.data.path[:] = os.environ["NLTK_DATA"].split(os.pathsep)  # only what was given by path
    return PunktTokenizer("english")


def nltk_sentences(text: str) -> list[str]:
    """Sentences as NLTK's Punkt model for English splits them."""
    return list(_punkt().tokenize(text))


def nltk_words(text: str) -> list[str]:
    """Words and punctuation marks as NLTK's `word_tokenize` splits them."""
    from nltk.tokenize import NLTKWordTokenizer

    return [word for sentence in nltk_sentences(text) for word in NLTKWordTokenizer().tokenize(sentence)]


@functools.cache
def nltk_stop_words() -> frozenset[str]:
    """NLTK's English stop words."""
    path = nltk_file("corpora/stopwords/english")
    if path is None:
        raise FileNotFoundError(_missing_nltk_file("corpora/stopwords/english"))
    return frozenset(path.read_text(encoding="utf-8").split())
