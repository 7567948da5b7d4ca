"""A verifier worker: reads requests, one JSON object a line, and answers each with one line.

Run by `rewards/process.py` as `python -m vibethinker_jax.rewards.worker CPU_SECONDS MEMORY_MIB`. The operating system
enforces the limits, so that no state of the interpreter can evade them: a response that uses up its CPU time ends the
process by SIGPROF, whatever it is doing. The clock stands still while the host gives this process no CPU.

    {"warm_up": KIND, "module": MODULE}              -> {"id": ..., "ready": KIND}
    {"judge": KIND, "spec": {...}, "response": TEXT} -> {"id": ..., "verdict": {...}, "retire": false}
    any failure of the machinery                     -> {"id": ..., "error": "..."}
"""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from vibethinker_jax.rewards.base import Verdict, get_verifier


def _take_protocol_streams() -> tuple[int, int]:
    """Moves the pipes off descriptors 0 and 1, so that nothing an imported library prints can corrupt a reply."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _set_process_limits(memory_mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent's thread may have blocked the signal we rely on
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a worker ends


def _answer(request: Mapping[str, Any], cpu_seconds: float) -> dict[str, Any]:
    if "warm_up" in request:
        importlib.import_module(request["module"])
        get_verifier(request["warm_up"], "worker").warm_up()
        return {"ready": request["warm_up"]}
    verifier = get_verifier(request["judge"], "worker")
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        verdict = verifier.judge(request["spec"], request["response"])
    except (MemoryError, RecursionError) as error:  # the response's own doing, like a timeout
        verdict = Verdict.binary(False, None, f"verification exceeded a limit: {type(error).__name__}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"verdict": verdict.to_dict()}


def _peak_mib() -> int:
    """Largest resident memory of this program so far.

    Not getrusage's ru_maxrss: that one survives exec, so it starts at the size of the process that started the worker,
    which in training is many gigabytes.
    """
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) >> 10
    raise RuntimeError("/proc/self/status has no VmHWM")


def main() -> None:
    """Serves until the parent closes the pipe."""
    cpu_seconds, memory_mib = float(sys.argv[1]), int(sys.argv[2])
    requests, replies = _take_protocol_streams()
    _set_process_limits(memory_mib)
    with os.fdopen(requests, "rb") as lines, os.fdopen(replies, "wb") as out:
        for line in lines:
            request = json.loads(line)
            try:
                reply = _answer(request, cpu_seconds)
            except Exception as error:  # reported to the parent, which counts it as a failure of the machinery
                reply = {"error": f"{type(error).__name__}: {error}"}
            # A heap that once was large would hand the next response less memory than its limit says.
            reply |= {"id": request["id"], "retire": _peak_mib() > memory_mib // 2}
            out.write(json.dumps(reply).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    main()
