"""Whole stages on a tiny model: they train, resume bit for bit after a kill, and load as policies."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import vibethinker_jax as vt
from tests.conftest import REPOSITORY
from vibethinker_jax.stages import run_stage
from vibethinker_jax.stages.reasoning_rl import prompts_of_step
from vibethinker_jax.training.loop import PREEMPTED
from vibethinker_jax.training.metrics_log import read_metrics


def load_config(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


TINY = {
    "initialise": "random",
    "max_position_embeddings": 0,
    "compute_dtype": "float32",
    "head_chunk": 16,
    "mlp_chunks": 2,
}


@pytest.fixture
def sft_config(model_directory, traces_file):
    config = load_config("sft_stage1")
    config.model.update(TINY, checkpoint=str(model_directory))
    config.update(
        {"sequence_length": 128, "global_batch_rows": 2, "micro_batch_rows": 1, "max_segments": 4, "remat": "none"}
    )
    config.data.update({"path": str(traces_file), "epochs": 6})
    config.mesh.devices = 1
    config.optimizer.peak = 1e-2
    config.loop.save_every = 1
    return config


@pytest.fixture
def mgpo_config(model_directory, problems_file):
    config = load_config("math_rl")
    config.model.update(TINY, checkpoint=str(model_directory))
    config.update({"steps": 5, "prompts_per_step": 3})
    config.data.path = str(problems_file)
    config.rollout.update({"samples": 4, "max_new_tokens": 12, "max_slots": 6})
    config.verifier.update({"workers": 1, "require_thinking": False})
    config.update({"sequence_length": 64, "micro_batch_rows": 2, "max_segments": 4, "remat": "none"})
    config.mesh.devices = 1
    config.optimizer.update({"peak": 1e-2, "floor": 1e-2})
    config.loop.save_every = 1
    return config


def stage_process(tmp_path, config, workdir, *arguments, **environment):
    """The stage in its own process with one device, as a user would run it."""
    path = tmp_path / f"{workdir.name}.json"
    path.write_text(json.dumps(config.to_dict()))
    environment = {**os.environ, "XLA_FLAGS": "", **environment}
    command = [sys.executable, "-m", "tests.stages.run_stage", str(path), str(workdir), *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True)


def finished(process):
    _, errors = process.communicate(timeout=600)
    return process.returncode, errors


def assert_same_checkpoint(first, second):
    """Bit-identical parameters, and the same metrics but for the seconds."""
    one, two = vt.load(first), vt.load(second)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    records = [
        [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in read_metrics(d)] for d in (first, second)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize("kind", ["sft", "mgpo"])
def test_a_killed_and_resumed_run_is_bit_identical(tmp_path, kind, sft_config, mgpo_config):
    config = sft_config if kind == "sft" else mgpo_config
    config.loop.save_every = 2
    if kind == "mgpo":
        config.mgpo.updates_per_batch = 2
    assert finished(stage_process(tmp_path, config, tmp_path / "whole"))[0] == 0
    # Killed while step 3 is logged, after the checkpoint of step 2 was started; and then once more in step 4.
    for kill in (2, 3):
        code, errors = finished(stage_process(tmp_path, config, tmp_path / "parts", kill))
        assert code == -signal.SIGKILL, errors
    config.loop.save_every = 1000  # does not change the numbers, so it may differ
    code, errors = finished(stage_process(tmp_path, config, tmp_path / "parts"))
    assert code == 0, errors
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "parts")
    steps = [record["step"] for record in read_metrics(tmp_path / "parts")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 5
    first = vt.load(tmp_path / "whole").params["embed"]["table"]
    assert np.isfinite(first).all()


def test_sigterm_saves_and_exits_with_its_own_code(tmp_path, sft_config):
    sft_config.data.epochs = 400
    sft_config.loop.save_every = 10_000
    process = stage_process(tmp_path, sft_config, tmp_path / "run")
    deadline = time.monotonic() + 300
    while len(read_metrics(tmp_path / "run")) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    code, errors = finished(process)
    assert code == PREEMPTED, errors
    done = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / str(done)).is_dir()
    vt.load(tmp_path / "run")


def test_sft_learns_its_traces_and_the_workdir_loads_as_a_policy(tmp_path, sft_config):
    sft_config.data.epochs = 30
    sft_config.loop.save_every = 1000
    run_stage(sft_config, tmp_path / "run")
    losses = [record["loss"] for record in read_metrics(tmp_path / "run")]
    assert losses[0] > 3
    assert losses[-1] < 1
    policy = vt.load(tmp_path / "run")
    assert policy.config.max_position_embeddings == 1024
    policy.save(tmp_path / "hf", "hf")
    again = vt.load(tmp_path / "hf")
    tokens = [policy.tokenizer.encode("1 + 1 = ?")]
    np.testing.assert_array_equal(policy.logits(tokens), again.logits(tokens))


def test_rollouts_are_kept_and_sampler_and_trainer_agree_after_updates(tmp_path, mgpo_config):
    run_stage(mgpo_config, tmp_path / "run")
    files = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step_{i:06d}.jsonl" for i in range(1, 6)]
    records = read_metrics(tmp_path / "run")
    assert all(record["mismatch/absolute_max"] <= 1e-5 for record in records)
    assert all(record["mismatch/k3"] <= 1e-9 for record in records)
    assert all(record["policy/ratio"] == 1.0 for record in records)
    assert max(record["reward"] for record in records) > 0, "nothing was learnt from"
    assert max(record["gradient_norm"] for record in records) > 0
    assert max(record["update_norm"] for record in records) > 0
    texts = [line for file in files for line in file.read_text().splitlines()[1:]]
    assert len(texts) == 15
    sampled = [json.loads(line) for line in texts]
    assert len({tuple(sample["tokens"]) for group in sampled for sample in group["samples"]}) > 30


def test_a_sharded_stage_gives_the_same_policy(tmp_path, mgpo_config):
    mgpo_config.steps = 2
    run_stage(mgpo_config, tmp_path / "one")
    mgpo_config.mesh.update({"fsdp": 2, "context": 2, "tensor": 2, "devices": 8})
    run_stage(mgpo_config, tmp_path / "eight")
    rollouts = [
        (tmp_path / run / "rollouts" / "step_000001.jsonl").read_text().splitlines()[1:] for run in ("one", "eight")
    ]
    tokens = [[[s["tokens"] for s in json.loads(line)["samples"]] for line in lines] for lines in rollouts]
    assert tokens[0] == tokens[1]
    first, second = vt.load(tmp_path / "one", step=1), vt.load(tmp_path / "eight", step=1)
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), first.params, second.params)
    assert max(jax.tree.leaves(moved)) < 1e-3


@pytest.mark.parametrize("kind", ["sft", "mgpo"])
def test_two_processes_train_the_policy_of_one(tmp_path, kind, sft_config, mgpo_config):
    config = sft_config if kind == "sft" else mgpo_config
    if kind == "sft":
        config.update({"global_batch_rows": 4, "micro_batch_rows": 4})
        config.data.epochs = 2
    else:
        config.update({"steps": 2})
    run_stage(config, tmp_path / "one")
    config.mesh.update({"fsdp": 2, "tensor": 2, "devices": 0})
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        stage_process(
            tmp_path,
            config,
            tmp_path / "two",
            STAGE_PROCESS=f"{address},2,{index}",
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )
        for index in range(2)
    ]
    try:
        for code, errors in map(finished, processes):
            assert code == 0, errors
    finally:
        for process in processes:
            process.kill()
    first, second = vt.load(tmp_path / "one", step=1), vt.load(tmp_path / "two", step=1)
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), first.params, second.params)
    assert max(jax.tree.leaves(moved)) < 1e-3
    losses = [[record["loss"] for record in read_metrics(tmp_path / run)] for run in ("one", "two")]
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-5, atol=1e-6)
    assert len(losses[0]) == len(losses[1])


def test_other_settings_in_the_same_workdir_are_refused_by_name(tmp_path, sft_config):
    sft_config.data.epochs = 1
    run_stage(sft_config, tmp_path / "run")
    sft_config.optimizer.peak = 5e-3
    with pytest.raises(vt.UserError, match=r"optimizer\.peak was 0\.01 and is 0\.005"):
        run_stage(sft_config, tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stage", "dpo", "config.stage is 'dpo'"),
        ("model.checkpoint", "", "config.model.checkpoint is empty"),
        ("model.initialise", "zeros", "config.model.initialise is 'zeros'"),
        ("micro_batch_rows", 3, "global_batch_rows is 2; make it a multiple of micro_batch_rows 3"),
        ("sequence_length", 4, "sequence_length is 4 and none of the 9 examples fits"),
        ("remat", "some", "remat policy is 'some'"),
        ("model.compute_dtype", "bf16", "config.model.compute_dtype is 'bf16'"),
        ("sequence_length", 2048, "sequence_length is 2048, but the model declares 1024 positions"),
        ("mesh.context", 3, r"mesh needs 3 devices \(replica 1 x fsdp 1 x context 3"),
    ],
)
def test_bad_settings_are_named(tmp_path, sft_config, field, value, message):
    sft_config.update_from_flattened_dict({field: value})
    with pytest.raises(vt.UserError, match=message):
        run_stage(sft_config, tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mgpo.aggregation", "mean", "aggregation is 'mean'"),
        ("mgpo.clip_low", 2.0, "clip_low, clip_high are 2.0"),
        ("mgpo.gamma", -1.0, "gamma is -1.0"),
        ("mgpo.tis_cap", -2.0, "cap is -2.0"),
        ("mgpo.updates_per_batch", 4, "updates_per_batch is 4; use 1 to prompts_per_step = 3"),
        ("sequence_length", 24, "0 problems have prompts of at most 12 tokens"),
        ("optimizer.floor", 1.0, "optimizer.floor is 1.0"),
    ],
)
def test_bad_rl_settings_are_named_before_anything_is_sampled(tmp_path, mgpo_config, field, value, message):
    mgpo_config.update_from_flattened_dict({field: value})
    with pytest.raises(vt.UserError, match=message):
        run_stage(mgpo_config, tmp_path / "run")
    assert not (tmp_path / "run" / "rollouts").exists()


def test_a_resumed_run_refuses_other_data(tmp_path, sft_config, traces_file):
    sft_config.data.epochs = 1
    copy = tmp_path / "traces.jsonl"
    copy.write_text(traces_file.read_text())
    sft_config.data.path = str(copy)
    run_stage(sft_config, tmp_path / "run")
    copy.write_text("".join(traces_file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(vt.UserError, match="the data has changed since the run began"):
        run_stage(sft_config, tmp_path / "run")


def test_every_epoch_visits_the_problems_in_another_order_without_repeats():
    problems = [vt.Problem(str(i), "math", (), {}, {}) for i in range(10)]
    steps = [[p.id for p in prompts_of_step(problems, step, 4, seed=3)] for step in range(8)]
    for epoch in range(4):
        seen = steps[2 * epoch] + steps[2 * epoch + 1]
        assert len(set(seen)) == 8
    assert steps[:2] != steps[2:4]
    assert steps == [[p.id for p in prompts_of_step(problems, step, 4, seed=3)] for step in range(8)]
    assert steps != [[p.id for p in prompts_of_step(problems, step, 4, seed=4)] for step in range(8)]
