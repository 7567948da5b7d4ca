from hypothesis import given, settings
from hypothesis import strategies as st

from vibethinker_jax.rollout.params import RequestHandle, SamplingParams
from vibethinker_jax.rollout.scheduler import PromptJob, Scheduler


def prompt(handle, index, n):
    return PromptJob(RequestHandle(handle), index, [1, 2], SamplingParams(n=n), (0,), 8, None)


def names(admissions):
    return [(admission.slot, admission.sample.prompt.index, admission.sample.sample_index) for admission in admissions]


def test_samples_take_slots_first_come_first_served():
    scheduler = Scheduler(max_slots=4, prefill_batch=2)
    scheduler.add([prompt(0, 0, 3), prompt(0, 1, 2), prompt(0, 2, 1)])
    assert scheduler.admit() == []
    assert [job.index for job in scheduler.take_prompts()] == [0, 1]
    assert names(scheduler.admit()) == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0)]
    assert scheduler.take_prompts() == []  # no slot is free, and prompt 1 is in a row
    scheduler.slots[2] = None
    assert names(scheduler.admit()) == [(2, 1, 1)]
    scheduler.slots[0] = scheduler.slots[1] = None
    assert [job.index for job in scheduler.take_prompts()] == [2]
    assert names(scheduler.admit()) == [(0, 2, 0)]
    assert scheduler.busy
    assert not scheduler.pending


def test_cancelling_frees_slots_rows_and_queue_of_that_request_only():
    scheduler = Scheduler(max_slots=3, prefill_batch=2)
    scheduler.add([prompt(0, 0, 2), prompt(1, 0, 5), prompt(0, 1, 1)])
    scheduler.take_prompts()
    scheduler.admit()
    assert scheduler.cancel(RequestHandle(1)) == [2]
    assert not scheduler.prefilled
    assert [job.index for job in scheduler.waiting] == [1]
    assert scheduler.cancel(RequestHandle(0)) == [0, 1]
    assert not scheduler.busy


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    slots=st.integers(1, 5),
    rows=st.integers(1, 3),
    ends=st.lists(st.integers(0, 4), max_size=60),
)
def test_every_sample_runs_once_from_the_row_that_holds_its_prompt(counts, slots, rows, ends):
    scheduler = Scheduler(slots, rows)
    scheduler.add(prompt(0, index, n) for index, n in enumerate(counts))
    held, started, ends = {}, [], iter(ends)
    while scheduler.busy:
        while True:
            for admission in scheduler.admit():
                assert held[admission.row] == admission.sample.prompt.index
                started.append((admission.sample.prompt.index, admission.sample.sample_index))
            taken = scheduler.take_prompts()
            held |= {row: job.index for row, job in enumerate(taken)}
            if not taken:
                break
        running = [slot for slot, sample in enumerate(scheduler.slots) if sample]
        assert len(running) == slots or not scheduler.pending
        scheduler.slots[running[next(ends, 0) % len(running)]] = None
    assert started == [(index, sample) for index, n in enumerate(counts) for sample in range(n)]
