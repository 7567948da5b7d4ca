"""Rewards: verdicts on responses. Imports no JAX and no model."""

import os
import threading
from typing import Any

from vibethinker_jax.rewards.base import Verdict, Verifier, register
from vibethinker_jax.rewards.pool import Limits, VerifierPool
from vibethinker_jax.rewards.thinking import answer_text

__all__ = ["Limits", "Verdict", "Verifier", "VerifierPool", "answer_text", "register", "verify"]

_pool: VerifierPool | None = None
_pool_pid = 0
_pool_lock = threading.Lock()


def _shared_pool() -> VerifierPool:
    global _pool, _pool_pid
    with _pool_lock:
        if _pool is None or _pool_pid != os.getpid():
            _pool, _pool_pid = VerifierPool(workers=min(4, os.cpu_count() or 1)), os.getpid()
        return _pool


def verify(problem: Any, response: str) -> Verdict:
    """Judges one response to one problem.

    Args:
        problem: a `Problem`, or its record as a mapping with at least `verifier`, such as
            `{"verifier": {"kind": "math", "answer": "72"}}`.
        response: the decoded response. With thinking in it, only the text after the last `</think>` counts.

    Returns:
        The Verdict. When the machinery failed, `error` says how, `reward` is NaN and `correct` None.

    Raises:
        UserError: the verifier entry is invalid (unknown kind, empty gold answer, unknown key).
    """
    return _shared_pool().submit(problem, response).result()
