"""The pool against verifiers and responses that hang, crash, exhaust and forge."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.rewards.faulty import problem
from tests.rewards.test_numbers import HAZARDS
from vibethinker_jax.rewards import Limits, Verdict, VerifierPool, verify

QUICK = Limits(timeout_s=1.0, wall_timeout_s=20.0, memory_mib=600, attempts=2)


def math_problem(answer):
    return {"id": "m", "verifier": {"kind": "math", "answer": answer}}


def is_gone(pid: int) -> bool:
    """Whether a process has ended and been collected (a zombie still takes signals)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def has_ended(pid: int) -> bool:
    """Whether a process, perhaps of another parent, has ended: gone, or a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(workers=1, limits=QUICK) as pool:
        yield pool


def assert_healthy(pool):
    assert pool.submit(problem("well"), "fine").result().answer == "fine"


@pytest.mark.parametrize("do", ["spin", "hold_interpreter_lock", "ignore_signals", "exhaust_memory", "recurse"])
def test_a_response_that_exceeds_its_limits_is_wrong_and_the_pool_survives(pool, do):
    verdict = pool.submit(problem(do), "x").result(timeout=60)
    assert (verdict.reward, verdict.correct, verdict.error) == (0.0, False, None), verdict
    assert "exceeded" in verdict.detail
    assert_healthy(pool)


@pytest.mark.parametrize("do", ["die", "exit", "fail", "forge"])
def test_a_failure_of_the_machinery_is_no_zero(pool, do):
    verdict = pool.submit(problem(do), "x").result(timeout=60)
    assert math.isnan(verdict.reward)
    assert verdict.correct is None
    assert "2 attempts" in verdict.error
    assert_healthy(pool)


def test_an_error_says_what_happened(pool):
    assert "killed by SIGKILL" in pool.submit(problem("die"), "x").result().error
    assert "(exit code 3); it wrote: last words" in pool.submit(problem("exit"), "x").result().error
    assert "OSError: disk on fire" in pool.submit(problem("fail"), "x").result().error


@pytest.mark.parametrize("do", ["die", "exit", "fail"])
def test_a_failure_that_does_not_repeat_gives_the_right_verdict(pool, tmp_path, do):
    verdict = pool.submit(problem(do, once=tmp_path / "failed"), "x").result(timeout=60)
    assert (verdict.reward, verdict.correct, verdict.error) == (1.0, True, None)


def test_a_worker_killed_from_outside_during_a_verdict_is_replaced(pool, tmp_path):
    future = pool.submit(problem("sleep", once=tmp_path / "asleep"), "x")
    assert eventually((tmp_path / "asleep").exists)
    (pid,) = pool.worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert future.result(timeout=60).correct is True
    assert is_gone(pid)
    assert pool.worker_pids() != [pid]


def test_printing_does_not_corrupt_the_protocol(pool):
    for _ in range(3):
        assert pool.submit(problem("chatter"), "x").result().correct is True


def test_wall_clock_time_without_cpu_time_is_tried_again(tmp_path):
    limits = Limits(timeout_s=0.5, wall_timeout_s=1.5, attempts=2)
    with VerifierPool(limits=limits) as pool:
        assert pool.submit(problem("sleep", once=tmp_path / "slept"), "x").result().correct is True
        verdict = pool.submit(problem("sleep"), "x").result()
        assert math.isnan(verdict.reward)
        assert "1.5 s of wall-clock time, with CPU time left" in verdict.error
        assert_healthy(pool)


def test_waiting_in_the_queue_counts_against_no_limit():
    limits = Limits(timeout_s=0.5, wall_timeout_s=2.5, attempts=1)
    with VerifierPool(workers=1, limits=limits) as pool:
        verdicts = pool.map([(problem("nap", seconds=0.4), "x")] * 8)  # 3.2 s in all
    assert [verdict.correct for verdict in verdicts] == [True] * 8


def test_workers_run_side_by_side():
    with VerifierPool(workers=3) as pool:
        pool.map([(problem("nap", seconds=0.5), "x")] * 3)  # start all three
        pids = {verdict.detail for verdict in pool.map([(problem("nap", seconds=0.5), "x")] * 3)}
        assert len(pids) == 3
        assert len(pool.worker_pids()) == 3


def test_workers_start_only_when_needed():
    with VerifierPool(workers=4) as pool:
        assert pool.submit(math_problem("7"), "\\boxed{8}").result().correct is False
        assert pool.worker_pids() == []
        for _ in range(3):
            assert_healthy(pool)
        assert len(pool.worker_pids()) == 1


def test_a_worker_is_replaced_after_its_number_of_verdicts():
    with VerifierPool(limits=Limits(recycle_after=2)) as pool:
        details = [pool.submit(problem("well"), "x").result().detail for _ in range(6)]
    assert [details[0] == details[1], details[1] == details[2]] == [True, False]
    assert len(set(details)) == 3


def test_a_worker_with_a_large_heap_is_replaced():
    with VerifierPool(limits=Limits(memory_mib=600, timeout_s=5.0)) as pool:
        assert pool.submit(problem("exhaust_memory"), "x").result().correct is False
        assert pool.worker_pids() == []
        assert_healthy(pool)


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_a_worker_that_cannot_start_is_an_error(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with VerifierPool(limits=QUICK) as pool:
        verdict = pool.submit(problem("well"), "x").result(timeout=60)
    assert math.isnan(verdict.reward)
    assert verdict.correct is None
    assert "2 attempts" in verdict.error


def test_a_verifier_whose_imports_fail_is_an_error(pool):
    verdict = pool.submit({"verifier": {"kind": "unready"}}, "x").result(timeout=60)
    assert math.isnan(verdict.reward)
    assert "no_such_package" in verdict.error


def test_too_little_memory_to_start_is_an_error_and_not_a_wrong_answer():
    with VerifierPool(limits=Limits(memory_mib=24, attempts=1)) as pool:
        verdict = pool.submit(math_problem("\\sqrt{8}"), "\\boxed{2\\sqrt{2}}").result(timeout=60)
    assert math.isnan(verdict.reward)
    assert verdict.error


# Each hostile expression twice: boxed (refused unparsed) and in dollars (the worker's limits alone protect).
@pytest.mark.parametrize("expression", HAZARDS[::2], ids=lambda text: text[:30])
def test_hostile_mathematics_ends_with_reward_zero_within_the_limit(pool, expression):
    started = time.monotonic()
    verdicts = pool.map(
        [
            (math_problem("72"), f"\\boxed{{{expression}}}"),
            (math_problem("72"), f"The answer is ${expression}$"),
        ]
    )
    assert [(v.reward, v.error) for v in verdicts] == [(0.0, None)] * 2, verdicts
    assert time.monotonic() - started < QUICK.wall_timeout_s
    assert pool.submit(math_problem("\\sqrt{8}"), "\\boxed{2\\sqrt{2}}").result().correct is True


def test_verdicts_from_several_threads_are_each_others_equals():
    cases = [(str(i), rf"\boxed{{\frac{{{2 * j}}}{{2}}}}", i == j) for i in range(4) for j in range(4)]
    failures = []
    with VerifierPool(workers=2) as pool:

        def run():
            for gold, response, right in cases:
                verdict = pool.submit(math_problem(gold), response).result()
                if verdict.correct is not right:
                    failures.append((gold, response, verdict))

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_close_kills_what_runs_and_cancels_what_waits():
    pool = VerifierPool(workers=1)
    running = pool.submit(problem("sleep"), "x")
    waiting = pool.submit(problem("well"), "x")
    assert eventually(lambda: running.running() and pool.worker_pids() != [])
    (pid,) = pool.worker_pids()
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert math.isnan(running.result(timeout=0).reward)
    assert "closed" in running.result().error
    assert waiting.cancelled()
    assert is_gone(pid)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(problem("well"), "x")


def test_a_cancelled_submission_is_passed_over(pool):
    blocker = pool.submit(problem("nap", seconds=0.5), "x")
    cancelled = pool.submit(problem("well"), "x")
    assert cancelled.cancel()
    assert blocker.result().correct is True
    assert_healthy(pool)


def test_limits_must_make_sense():
    with pytest.raises(ValueError, match="wall_timeout_s is 1; it must exceed"):
        Limits(timeout_s=2.0, wall_timeout_s=1.0)
    with pytest.raises(ValueError, match="memory_mib is 0"):
        Limits(memory_mib=0)
    with pytest.raises(ValueError, match="workers is 0"):
        VerifierPool(workers=0)


def test_verdicts_survive_their_plain_form():
    for verdict in (Verdict.binary(True, "7", "d"), Verdict.binary(False, None, "d")):
        assert Verdict.from_dict(verdict.to_dict()) == verdict
    failed = Verdict.failed("broken")
    assert failed.to_dict()["reward"] is None
    assert math.isnan(Verdict.from_dict(failed.to_dict()).reward)


def run_script(text: str, tmp_path: pathlib.Path) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )


def test_an_unguarded_script_may_verify_from_any_thread(tmp_path):
    script = r"""
import threading
import vibethinker_jax.rewards as rewards
problem = {"verifier": {"kind": "math", "answer": "\\frac{1}{2}"}}
print(rewards.verify(problem, "\\boxed{0.5}").reward)
thread = threading.Thread(target=lambda: print(rewards.verify(problem, "\\boxed{0.25}").reward))
thread.start()
thread.join()
"""
    with run_script(script, tmp_path) as process:
        assert process.communicate(timeout=120)[0].split() == ["1.0", "0.0"]
        assert process.returncode == 0


def test_interpreter_exit_waits_for_no_verdict_and_leaves_no_process(tmp_path):
    script = """
import time
from tests.rewards.faulty import problem
from vibethinker_jax.rewards import VerifierPool
pool = VerifierPool(workers=2, timeout_s=100.0)
futures = [pool.submit(problem(do), "x") for do in ("spin", "sleep", "well")]
while len(pool.worker_pids()) < 2:
    time.sleep(0.05)
print(*pool.worker_pids(), time.time())
"""
    with run_script(script, tmp_path) as process:
        *pids, last_line_at = process.communicate(timeout=120)[0].split()
    assert process.returncode == 0
    assert time.time() - float(last_line_at) < 10
    assert len(pids) == 2
    assert all(is_gone(int(pid)) for pid in pids)


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = """
import time
from tests.rewards.faulty import problem
from vibethinker_jax.rewards import VerifierPool
pool = VerifierPool(workers=2, timeout_s=1.0)
pool.submit(problem("well"), "x").result()
pool.submit(problem("spin"), "x")
while len(pool.worker_pids()) < 1:
    time.sleep(0.05)
print(*pool.worker_pids(), flush=True)
time.sleep(600)
"""
    with run_script(script, tmp_path) as process:
        pids = process.stdout.readline().split()
        process.kill()
    assert pids
    assert eventually(lambda: all(has_ended(int(pid)) for pid in pids))


def test_a_pool_is_refused_in_a_forked_child(pool):
    assert_healthy(pool)
    child = os.fork()
    if child == 0:  # no assertion here: a failure must not run the rest of the tests twice
        try:
            pool.submit(problem("well"), "x")
        except RuntimeError:
            pool.close()  # must not kill the parent's workers
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_healthy(pool)


def test_verify_takes_records_and_problems():
    from vibethinker_jax.data.records import Problem

    record = {
        "id": "a",
        "domain": "math",
        "prompt": ({"role": "user", "content": "6 * 12?"},),
        "verifier": {"kind": "math", "answer": "72"},
        "meta": {},
    }
    assert verify(record, "#### 72").correct is True
    assert verify(Problem(**record), "#### 71").correct is False


def test_workers_of_a_large_process_are_kept():
    # ru_maxrss survives exec: a worker must not take the size of its parent for its own.
    program = (
        "import sys\n"
        "ballast = bytearray(b'x') * (1500 << 20)\n"
        "from vibethinker_jax.rewards import VerifierPool\n"
        "problem = {'verifier': {'kind': 'math', 'answer': '\\\\sqrt{8}'}}\n"
        "with VerifierPool() as pool:\n"
        "    pids = []\n"
        "    for _ in range(3):\n"
        "        assert pool.submit(problem, '\\\\boxed{2\\\\sqrt{2}}').result().correct\n"
        "        pids.append(tuple(pool.worker_pids()))\n"
        "print(len(set(pids)), len(pids[0]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1"]
