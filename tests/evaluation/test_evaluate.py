"""Evaluation end to end with a fake engine and the real verifier pool."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.evaluation.fake_engine import FakeEngine, Killed
from tests.rewards import faulty
from vibethinker_jax.data.records import Problem
from vibethinker_jax.errors import UserError
from vibethinker_jax.evaluation import evaluate, problem_seed
from vibethinker_jax.rewards import Limits, VerifierPool
from vibethinker_jax.rollout.params import RequestHandle, SamplingParams

PARAMS = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=200)


def make_problem(number, verifier=None):
    prompt = ({"role": "user", "content": f"Write the number {number}"},)
    verifier = verifier or {"kind": "math", "answer": str(number)}
    return Problem(f"p-{number}", "math", prompt, verifier, {})


PROBLEMS = [make_problem(number) for number in (3, 14, 159)]


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(limits=Limits(timeout_s=2.0, wall_timeout_s=30.0, attempts=1)) as pool:
        yield pool


def run(pool, output, engine=None, **changes):
    settings = {"problems": PROBLEMS, "samples": 4, "params": PARAMS, "seed": 5} | changes
    return evaluate(engine or FakeEngine(), pool=pool, output=output, **settings)


def lines(output):
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def by_key(output):
    return {(line["problem_id"], line["sample"]): line for line in lines(output)}


def test_the_report_is_what_the_samples_say(pool, tmp_path):
    report = run(pool, tmp_path)
    samples = by_key(tmp_path)
    assert samples.keys() == {(problem.id, i) for problem in PROBLEMS for i in range(4)}
    means = [sum(samples[problem.id, i]["verdict"]["reward"] for i in range(4)) / 4 for problem in PROBLEMS]
    assert report.figure.value == pytest.approx(sum(means) / 3)
    assert 0 < report.figure.value < 1  # or the test shows little
    assert report.truncation_rate == sum(line["finish_reason"] == "length" for line in samples.values()) / 12
    assert report.truncation_rate > 0
    assert report.mean_tokens == pytest.approx(sum(line["tokens"] for line in samples.values()) / 12)
    assert set(report.pass_at_k) == {1, 2, 4}
    assert report.pass_at_k[1][0] == pytest.approx(report.figure.value)
    for line in samples.values():
        right = line["problem_id"].removeprefix("p-")
        assert line["verdict"]["correct"] == (line["text"] == f"so \\boxed{{{right}}}")
        assert line["verdict"]["error"] is None
        assert line["seed"] == problem_seed(5, line["problem_id"])
        assert line["prompt_tokens"] == 5
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["figure"]["value"] == report.figure.value
    assert f"avg@4       {100 * report.figure.value:.1f}%" in str(report)


def test_seeds_depend_on_run_and_problem_only():
    assert problem_seed(0, "a") == problem_seed(0, "a")
    assert len({problem_seed(seed, name) for seed in range(20) for name in "abc"}) == 60
    assert all(0 <= problem_seed(0, str(i)) < 2**31 for i in range(100))
    # sha256("0\na") begins with a fixed word on every machine and in every process: no PYTHONHASHSEED in it
    program = "from vibethinker_jax.evaluation import problem_seed; print(problem_seed(0, 'a'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "77"}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(shown.stdout) == problem_seed(0, "a")


def test_importing_evaluation_imports_no_jax():
    program = "import sys, vibethinker_jax.evaluation; print('jax' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_samples_do_not_depend_on_other_problems_or_their_order(pool, tmp_path):
    run(pool, tmp_path / "all")
    run(pool, tmp_path / "some", problems=[PROBLEMS[2], PROBLEMS[0]])
    whole, part = by_key(tmp_path / "all"), by_key(tmp_path / "some")
    assert len(part) == 8
    assert all(whole[key] == line for key, line in part.items())


@pytest.mark.parametrize("kill_after", range(13))
def test_a_run_killed_after_any_sample_continues_to_the_same_report(pool, tmp_path, kill_after):
    whole = run(pool, tmp_path / "whole")
    engine = FakeEngine(kill_after=kill_after)
    if kill_after < 12:
        with pytest.raises(Killed):
            run(pool, tmp_path / "killed", engine)
        assert engine.cancelled == [RequestHandle(0)]
        assert len(lines(tmp_path / "killed")) == kill_after
    engine = FakeEngine()
    assert run(pool, tmp_path / "killed", engine) == whole
    assert by_key(tmp_path / "killed") == by_key(tmp_path / "whole")
    assert len(lines(tmp_path / "killed")) == 12  # nothing was recorded twice


def test_a_finished_run_is_reported_without_decoding(pool, tmp_path):
    whole = run(pool, tmp_path)
    engine = FakeEngine()
    assert run(pool, tmp_path, engine) == whole
    assert engine.submitted == []


def test_only_problems_with_missing_samples_are_drawn_again(pool, tmp_path):
    run(pool, tmp_path)
    kept = [json.dumps(line) for line in lines(tmp_path) if (line["problem_id"], line["sample"]) != ("p-14", 2)]
    (tmp_path / "samples.jsonl").write_text("\n".join(kept) + "\n")
    engine = FakeEngine()
    run(pool, tmp_path, engine)
    ((params,),) = engine.submitted
    assert (params.n, params.seed) == (3, problem_seed(5, "p-14"))
    assert len(lines(tmp_path)) == 12


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_torn_last_line_is_dropped_and_drawn_again(pool, tmp_path, cut):
    whole = run(pool, tmp_path)
    samples = by_key(tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert run(pool, tmp_path) == whole
    assert by_key(tmp_path) == samples
    assert len(lines(tmp_path)) == 12


def test_a_damaged_line_in_the_middle_is_an_error(pool, tmp_path):
    run(pool, tmp_path)
    path = tmp_path / "samples.jsonl"
    content = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*content[:4], content[4][:30] + "\n", *content[5:]]))
    with pytest.raises(UserError, match=r"samples\.jsonl:5: the line is damaged"):
        run(pool, tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"samples": 5}, "samples was 4 and is now 5"),
        ({"seed": 6}, "seed was 5 and is now 6"),
        ({"params": SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=200)}, "params.temperature was 1.0 and"),
        ({"problems": PROBLEMS[:2]}, "problems was 3 and is now 2"),
        ({"problems": [*PROBLEMS[:2], make_problem(160)]}, "problems_sha256 was"),
        ({"benchmark": "aime25"}, "benchmark was 'problems' and is now 'aime25'"),
        ({"checkpoint": "other"}, "checkpoint was None and is now 'other'"),
        ({"engine": FakeEngine(max_length=128)}, "max_length was 4096 and is now 128"),
    ],
)
def test_samples_of_other_settings_are_refused_by_name(pool, tmp_path, changes, field):
    run(pool, tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(UserError, match=field):
        run(pool, tmp_path, **changes)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_two_evaluations_cannot_share_an_output(pool, tmp_path):
    engine = FakeEngine()
    run(pool, tmp_path)
    (tmp_path / "samples.jsonl").write_text("")
    completions = engine.completions

    def meddling():
        with pytest.raises(UserError, match="another evaluation is writing"):
            run(pool, tmp_path)
        yield from completions()

    engine.completions = meddling
    run(pool, tmp_path, engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": []}, "problems is empty"),
        ({"problems": [PROBLEMS[0], PROBLEMS[0]]}, "p-3: id occurs twice"),
        ({"samples": 0}, "--samples is 0"),
        ({"benchmark": "aime99"}, "--benchmark is 'aime99'; use one of: aime25"),
        ({"problems": [make_problem(1, {"kind": "math", "answer": ""})]}, "verifier.answer is ''"),
    ],
)
def test_bad_input_stops_before_anything_is_decoded(pool, tmp_path, changes, message):
    engine = FakeEngine()
    with pytest.raises(UserError, match=message):
        run(pool, tmp_path, engine, **changes)
    assert engine.submitted == []
    assert not (tmp_path / "samples.jsonl").exists()


def test_an_object_store_is_refused_as_output(pool):
    with pytest.raises(UserError, match="give a local directory"):
        run(pool, "gs://bucket/eval")


def test_failures_of_the_machinery_are_counted_and_judged_again(pool, tmp_path):
    broken = [make_problem(7, faulty.problem("die", once=tmp_path / "died")["verifier"]), *PROBLEMS]
    first = run(pool, tmp_path / "out", problems=broken, samples=2)
    assert first.figure.missing == 1  # attempts is 1, and only the first verdict dies
    assert first.figure.samples == 7
    ((message, count),) = first.errors.items()
    assert "SIGKILL" in message
    assert count == 1
    assert first.pass_at_k[2][1] == 3  # problem 7 has one verdict only
    assert "over the 3 problems" in str(first)
    engine = FakeEngine()
    second = run(pool, tmp_path / "out", engine, problems=broken, samples=2)
    assert engine.submitted == []  # the text is there, only the verdict was not
    assert second.figure.missing == 0
    assert second.errors == {}


def test_verdicts_do_not_hold_up_decoding(tmp_path):
    problems = [make_problem(n, faulty.problem("nap", seconds=0.5)["verifier"]) for n in range(4)]
    engine, arrivals = FakeEngine(), []
    completions = engine.completions

    def timed():
        for sample in completions():
            arrivals.append(time.monotonic())
            yield sample

    engine.completions = timed
    with VerifierPool() as pool:
        report = run(pool, tmp_path, engine, problems=problems, samples=1)
    assert report.figure.value == 1.0
    assert arrivals[-1] - arrivals[0] < 1.0  # 4 x 0.5 s of judging happened beside and after it


def test_an_engine_that_loses_samples_is_an_error(pool, tmp_path):
    engine = FakeEngine()
    completions = engine.completions
    engine.completions = lambda: (sample for sample in completions() if sample.sample_index != 3)
    with pytest.raises(RuntimeError, match="3 samples missing"):
        run(pool, tmp_path, engine)


def test_a_full_disk_is_an_error(pool, tmp_path, monkeypatch):
    from vibethinker_jax.evaluation.samples import SampleLog

    def refuse(self, record):
        raise OSError("no space left on device")

    monkeypatch.setattr(SampleLog, "append", refuse)
    with pytest.raises(OSError, match="no space left"):
        run(pool, tmp_path)


def test_rewards_without_correctness_have_no_pass_at_k(pool, tmp_path):
    report = run(pool, tmp_path, problems=[make_problem(7, {"kind": "half"}), make_problem(8, {"kind": "half"})])
    assert report.figure.value == 0.5
    assert report.pass_at_k == {}
    assert "all problems scored alike" in str(report)


def test_published_figures_stand_beside_ours_with_the_differences(pool, tmp_path):
    report = run(pool, tmp_path, benchmark="aime25")
    table = str(report)
    assert "91.4% Pass@1 (VibeThinker-3B report" in table
    assert "96.7% Pass@1 + CLR" in table
    assert "NOT comparable" in table
    for phrase in (
        "3 of 30 problems",
        "4 samples per problem, not 64",
        "at most 200 new tokens, not the model's window",
        "a window of 4,096 tokens",
    ):
        assert phrase in table


def test_the_protocol_itself_differs_in_nothing(pool, tmp_path):
    problems = [make_problem(number) for number in range(30)]
    params = SamplingParams(temperature=1.0, top_p=0.95)
    engine = FakeEngine(max_length=65536)
    report = run(pool, tmp_path, engine, benchmark="aime25", problems=problems, samples=64, params=params)
    assert report.differences == []
    assert "NOT comparable" not in str(report)


def test_a_process_killed_at_a_random_moment_leaves_a_resumable_run(pool, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys, time
from tests.evaluation.fake_engine import FakeEngine
from tests.evaluation.test_evaluate import PROBLEMS, run
from vibethinker_jax.rewards import VerifierPool
engine = FakeEngine()
completions = engine.completions
def slow():
    for sample in completions():
        time.sleep(0.05)
        yield sample
engine.completions = slow
with VerifierPool() as pool:
    run(pool, sys.argv[1], engine)
"""
    )
    output = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script), str(output)], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((output / "samples.jsonl").exists() and lines(output)):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 0 < len(lines(output)) < 12
    assert run(pool, output) == run(pool, tmp_path / "whole")
    assert by_key(output) == by_key(tmp_path / "whole")


def test_reports_are_strict_json_without_verdicts(tmp_path):
    dead = Limits(timeout_s=1.0, attempts=1)
    with VerifierPool(limits=dead) as pool:
        report = run(pool, tmp_path, problems=[make_problem(7, faulty.problem("die")["verifier"])], samples=1)
    assert math.isnan(report.figure.value)
    assert "n/a" in str(report)
    stored = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert stored["figure"]["value"] is None
