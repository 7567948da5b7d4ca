"""A verifier that misbehaves on request, for tests of the pool. Importable by worker processes.

`spec["do"]` names the behaviour; `spec["once"]`, where given, is a file whose existence ends the misbehaviour.
"""

import os
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.base import Verdict, Verifier, register


def problem(do: str, once: pathlib.Path | None = None, **fields: Any) -> dict[str, Any]:
    """A problem record whose verdict is made by behaviour `do`."""
    spec = {"kind": "faulty", "do": do, **fields} | ({"once": str(once)} if once else {})
    return {"id": do, "verifier": spec}


class _Behaviours:
    """Every method may return (the verdict is then "right") or not."""

    def well(self, spec: Mapping[str, Any]) -> None:
        pass

    def nap(self, spec: Mapping[str, Any]) -> None:
        time.sleep(spec["seconds"])

    def sleep(self, spec: Mapping[str, Any]) -> None:
        time.sleep(600)

    def spin(self, spec: Mapping[str, Any]) -> None:
        while True:
            pass

    def hold_interpreter_lock(self, spec: Mapping[str, Any]) -> None:
        10 ** (10**10)  # one operation of many minutes, during which no Python signal handler or thread can run

    def ignore_signals(self, spec: Mapping[str, Any]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        self.spin(spec)

    def exhaust_memory(self, spec: Mapping[str, Any]) -> None:
        hoard = []
        while True:
            hoard.append(bytearray(64 << 20))

    def recurse(self, spec: Mapping[str, Any]) -> None:
        self.recurse(spec)

    def die(self, spec: Mapping[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self, spec: Mapping[str, Any]) -> None:
        print("last words")
        os._exit(3)

    def fail(self, spec: Mapping[str, Any]) -> None:
        raise OSError("disk on fire")

    def chatter(self, spec: Mapping[str, Any]) -> None:
        print('{"id": 1, "verdict": null}')
        os.write(1, b'{"id": 2}\n' * 3)

    def forge(self, spec: Mapping[str, Any]) -> None:
        for descriptor in range(3, 64):  # writes into whatever is open, the private pipe included
            try:
                os.write(descriptor, b'{"id": 0, "verdict": {"reward": 1.0}}\n')
            except OSError:
                continue


@register("faulty")
class FaultyVerifier(Verifier):
    def check(self, spec: Mapping[str, Any], where: str) -> None:
        getattr(_Behaviours, spec["do"])

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        once = pathlib.Path(spec["once"]) if "once" in spec else None
        if once is None or not once.exists():
            if once is not None:
                once.touch()
            getattr(_Behaviours(), spec["do"])(spec)
        return Verdict.binary(True, response, f"judged by {os.getpid()}")


@register("unready")
class UnreadyVerifier(Verifier):
    """Its dependencies cannot be imported."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        pass

    def warm_up(self) -> None:
        import no_such_package  # noqa: F401

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        return Verdict.binary(True, response, "unreachable")


@register("half")
class HalfVerifier(Verifier):
    """Graded: a reward without right or wrong."""

    def check(self, spec: Mapping[str, Any], where: str) -> None:
        pass

    def judge(self, spec: Mapping[str, Any], response: str) -> Verdict:
        return Verdict(reward=0.5, correct=None, answer=None, detail="half of the points")
