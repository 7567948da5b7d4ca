"""A pool of killable verifier workers: submission returns at once, verdicts arrive while other sequences decode."""

import atexit
import os
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from vibethinker_jax.rewards.base import Verdict, checked
from vibethinker_jax.rewards.process import CandidateTimeout, WorkerFailure, WorkerProcess


@dataclass(frozen=True)
class Limits:
    """Limits of one verdict and of one worker process.

    Attributes:
        timeout_s: CPU seconds of one verdict. Beyond it the response is wrong.
        wall_timeout_s: wall-clock seconds from the moment a worker takes a response. Beyond it the machinery failed.
        start_timeout_s: wall-clock seconds for a worker to start and import a verifier kind.
        memory_mib: address space of a worker. Beyond it the response is wrong.
        recycle_after: verdicts after which a worker is replaced.
        attempts: tries, each with a fresh worker, before a failure of the machinery becomes the verdict's `error`.
    """

    timeout_s: float = 5.0
    wall_timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    memory_mib: int = 2048
    recycle_after: int = 1000
    attempts: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.wall_timeout_s <= self.timeout_s:
            limit = f"the CPU limit timeout_s ({self.timeout_s:g})"
            raise ValueError(f"wall_timeout_s is {self.wall_timeout_s:g}; it must exceed {limit}")


@dataclass(frozen=True)
class _Job:
    kind: str
    module: str
    spec: dict[str, Any]
    response: str
    future: Future[Verdict]


class VerifierPool:
    """Verifies responses in worker processes; usable from any thread, script or notebook.

    Verdicts that plain string work settles (`Verifier.decide`) never reach a worker. The others wait in one queue; the
    wait counts against no limit. What a response does to its worker decides what the failure means:

    - CPU time or memory used up: the response is wrong, reward 0.
    - The worker died, could not start, broke the protocol, or got no CPU: tried again with a fresh one, finally a
      verdict with `error` set and reward NaN. Never a zero.

    Args:
        workers: largest number of worker processes; each starts when first needed.
        timeout_s: CPU seconds of one verdict.
        limits: all limits; overrides `timeout_s`.
    """

    def __init__(self, workers: int = 1, timeout_s: float = 5.0, limits: Limits | None = None) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; it must be at least 1")
        self.limits = limits or Limits(timeout_s=timeout_s, wall_timeout_s=6 * timeout_s)
        self._workers = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()  # guards the three fields below
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._processes: set[WorkerProcess] = set()
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    def submit(self, problem: Any, response: str) -> Future[Verdict]:
        """Queues one response.

        Args:
            problem: a `Problem`, or its record as a mapping; only `id` and `verifier` are read.
            response: the decoded response, thinking included.

        Returns:
            A future of the Verdict. It raises CancelledError if the pool is closed before a worker took the response.

        Raises:
            UserError: the problem's verifier is invalid, or the response is no string.
        """
        verifier, spec = checked(problem, response)
        if self._owner_pid != os.getpid():
            raise RuntimeError("this VerifierPool was made before the process forked; make one in the child")
        future: Future[Verdict] = Future()
        decided = verifier.decide(spec, response)
        if decided is not None:
            future.set_result(decided)
            return future
        job = _Job(spec["kind"], type(verifier).__module__, spec, response, future)
        with self._lock:
            if self._closed:
                raise RuntimeError("this VerifierPool is closed")
            self._jobs.put(job)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._workers:
                # daemon: interpreter exit must not wait for verdicts; `close` runs at exit and ends the processes
                thread = threading.Thread(target=self._serve, name=f"verifier-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def map(self, pairs: Iterable[tuple[Any, str]]) -> list[Verdict]:
        """Verdicts of (problem, response) pairs, in order."""
        futures = [self.submit(problem, response) for problem, response in pairs]
        return [future.result() for future in futures]

    @property
    def closed(self) -> bool:
        return self._closed

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        with self._lock:
            return sorted(process.pid for process in self._processes)

    def close(self) -> None:
        """Kills the workers. Waiting submissions are cancelled, running ones get a verdict with `error`. Idempotent."""
        if self._owner_pid != os.getpid():  # a forked child must not kill its parent's workers
            return
        with self._lock:
            self._closed = True
            threads, processes = list(self._threads), list(self._processes)
        atexit.unregister(self.close)
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.cancel()
        for _ in threads:
            self._jobs.put(None)
        for process in processes:
            process.signal_kill()
        for thread in threads:
            if thread is not threading.current_thread():  # a future's callback may close the pool
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        """Body of one thread, which drives one worker process after another."""
        slot = _Slot(self)
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    job.future.set_result(slot.judge(job))
                except BaseException as error:  # a bug in the pool must reach the caller and not hang the future
                    slot.discard()
                    job.future.set_exception(error)
            self._idle.release()
        slot.discard()

    def _start_process(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise WorkerFailure("the pool is closed")
            process = WorkerProcess(self.limits.timeout_s, self.limits.memory_mib)
            self._processes.add(process)
        return process

    def _forget_process(self, process: WorkerProcess) -> None:
        with self._lock:
            self._processes.discard(process)


class _Slot:
    """The worker process of one thread, replaced whenever it has failed, or has served long enough."""

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self._limits = pool.limits
        self._process: WorkerProcess | None = None

    def judge(self, job: _Job) -> Verdict:
        """The verdict; failures of the machinery are tried again and then become its `error`."""
        failures = []
        while len(failures) < self._limits.attempts:
            try:
                return self._attempt(job)
            except CandidateTimeout:
                self.discard()
                return Verdict.binary(False, None, f"verification exceeded {self._limits.timeout_s:g} s of CPU time")
            except WorkerFailure as failure:
                self.discard()
                failures.append(str(failure))
            if self._pool.closed:
                return Verdict.failed("the pool was closed during verification")
        return Verdict.failed(f"no verdict in {len(failures)} attempts: {'; '.join(failures)}")

    def _attempt(self, job: _Job) -> Verdict:
        if self._process is None:
            self._process = self._pool._start_process()
        process = self._process
        if job.kind not in process.warm:
            process.ask({"warm_up": job.kind, "module": job.module}, self._limits.start_timeout_s)
            process.warm.add(job.kind)
        request = {"judge": job.kind, "spec": job.spec, "response": job.response}
        reply = process.ask(request, self._limits.wall_timeout_s)
        process.verdicts += 1
        try:
            verdict, retire = Verdict.from_dict(reply["verdict"]), reply["retire"]
        except (KeyError, TypeError) as broken:
            raise WorkerFailure(f"worker sent a malformed verdict: {broken!r}") from broken
        if retire or process.verdicts >= self._limits.recycle_after:
            self.discard()
        return verdict

    def discard(self) -> None:
        """Ends the worker process, if there is one; the next job starts a fresh one."""
        if self._process is not None:
            self._process.kill()
            self._pool._forget_process(self._process)
            self._process = None
