"""One verifier worker process as its owner sees it: start, ask with a deadline, kill."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

STDERR_TAIL_BYTES = 2000


class WorkerFailure(Exception):
    """The machinery failed: nothing is known about the response."""


class CandidateTimeout(Exception):
    """Verification of this response used up its CPU time."""


class WorkerProcess:
    """A `python -m vibethinker_jax.rewards.worker` in its own session, behind two private pipes.

    Not multiprocessing: a spawned child would re-import the user's main script, a forked one would inherit a
    multi-threaded JAX process. Used by one thread, except `signal_kill`, which any thread may call.

    Args:
        cpu_seconds: CPU time allowed to one verdict; the worker's own timer enforces it.
        memory_mib: limit of the worker's address space.
    """

    def __init__(self, cpu_seconds: float, memory_mib: int) -> None:
        self.warm: set[str] = set()  # verifier kinds whose imports are done
        self.verdicts = 0
        self._next_id = 0
        self._unread = b""
        self._reaped = False
        self._lock = threading.Lock()
        # The worker sees the modules that this process sees. A fixed hash seed makes verdicts reproducible: the order
        # of terms in symbolic sums depends on it.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", "-m", "vibethinker_jax.rewards.worker", str(cpu_seconds), str(memory_mib)]
        with contextlib.ExitStack() as on_failure:
            try:
                self._stderr = on_failure.enter_context(tempfile.TemporaryFile())
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    bufsize=0,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:  # no such interpreter, no descriptors, memory or disk left
                raise WorkerFailure(f"cannot start {sys.executable}: {error}") from error
            on_failure.pop_all()
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends one request and waits for its reply.

        Raises:
            CandidateTimeout: the worker was ended by its CPU timer.
            WorkerFailure: it died otherwise, broke the protocol, reported an error, or `timeout_s` seconds of
                wall-clock time passed with CPU time left, which is the host's doing and not the response's.
        """
        self._next_id += 1
        outgoing = memoryview(json.dumps(request | {"id": self._next_id}).encode() + b"\n")
        line = self._exchange(outgoing, time.monotonic() + timeout_s)
        if line is None:
            raise WorkerFailure(f"no reply in {timeout_s:g} s of wall-clock time, with CPU time left: overloaded host?")
        try:
            reply = json.loads(line)
            replied_id, error = reply["id"], reply.get("error")
        except (ValueError, TypeError, KeyError, AttributeError) as broken:
            raise WorkerFailure(f"worker sent no reply but {line[:80]!r}") from broken
        if replied_id != self._next_id:
            raise WorkerFailure(f"worker answered request {replied_id} instead of {self._next_id}")
        if error is not None:
            raise WorkerFailure(f"worker reported {error}")
        return reply

    def _exchange(self, outgoing: memoryview, deadline: float) -> bytes | None:
        """Writes and reads at once, blocking in neither, until a line is in (returned) or time is out (None)."""
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        poller.register(stdin, select.POLLOUT)
        while b"\n" not in self._unread:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            ready = dict(poller.poll(remaining * 1000))
            if stdout in ready:
                chunk = os.read(stdout, 1 << 16)
                if not chunk:
                    raise self._death()
                self._unread += chunk
            elif stdin in ready:
                try:
                    outgoing = outgoing[os.write(stdin, outgoing) :]
                except BrokenPipeError:
                    raise self._death() from None
                if not outgoing:
                    poller.unregister(stdin)
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> CandidateTimeout | WorkerFailure:
        """What the end of the process means."""
        with self._lock:
            self._reap()
            code = self._process.returncode
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
            tail = self._stderr.read().decode(errors="replace").strip()
        if code == -signal.SIGPROF:
            return CandidateTimeout()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerFailure(f"worker died ({how})" + (f"; it wrote: {tail}" if tail else ""))

    def _reap(self) -> None:
        """Kills what is left of the session and collects the exit status; that of the dead stays what it was."""
        if not self._reaped:
            self._send_kill()
            self._process.wait()
            self._reaped = True

    def _send_kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # its session does not exist yet, or nothing is left of it

    def signal_kill(self) -> None:
        """Kills the process; its owner notices and collects it. For other threads than the owner."""
        with self._lock:
            if not self._reaped:
                self._send_kill()

    def kill(self) -> None:
        """Kills the process and releases everything. May be called twice."""
        with self._lock:
            self._reap()
            self._stderr.close()
            self._process.stdin.close()
            self._process.stdout.close()
