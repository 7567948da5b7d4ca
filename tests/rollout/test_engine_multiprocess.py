"""Two processes that share a mesh run the same schedule and both get everything."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from vibethinker_jax.rollout.params import SamplingParams

PROMPTS = [[5], [7, 1, 3], list(range(20, 29)), list(range(40, 57))]
SETTINGS = [
    {"temperature": 0, "max_new_tokens": 12},
    {"n": 3, "seed": 4},
    {"n": 5, "seed": 2, "top_p": 0.8},
    {"temperature": 0, "stop_token_ids": [], "stop": "a"},
]


def test_both_processes_get_the_same_completions_and_the_tokens_of_one_device(shared_engine):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.rollout.multiprocess_worker"]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [
        subprocess.Popen(
            [*command, str(index), coordinator, json.dumps([PROMPTS, SETTINGS])],
            cwd=pathlib.Path(__file__).parents[2],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    expected = shared_engine.generate(PROMPTS, [SamplingParams(**one) for one in SETTINGS])
    for index in (0, 3):  # greedy: sums in another order do not matter
        [[text, tokens, log_probs, reason]], [completion] = first["results"][index], expected[index]
        assert (text, tokens, reason) == (completion.text, completion.tokens, completion.finish_reason)
        assert log_probs == pytest.approx(completion.log_probs, abs=1e-5)
