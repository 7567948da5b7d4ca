"""What a run leaves in its directory, and what it accepts there."""

import json
import math

import pytest
from etils import epath
from ml_collections import ConfigDict

from vibethinker_jax.errors import UserError
from vibethinker_jax.training.metrics_log import MetricsLog, read_metrics
from vibethinker_jax.training.workdir import open_workdir, run_fingerprint


def config(**changes):
    return ConfigDict({"seed": 1, "loop": {"save_every": 2}, "optimizer": {"peak": 0.1}, "band": (), **changes})


def test_resumed_metrics_hold_every_step_once(tmp_path):
    directory = epath.Path(tmp_path)
    log = MetricsLog(directory, 0, 6, ("loss",), "run")
    for step in (1, 2, 3, 4):
        log.write(step, {"loss": 1 / step, "bad": math.nan})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "lo')  # torn by a kill
    log = MetricsLog(directory, 2, 6, ("loss",), "run")
    log.write(3, {"loss": 7.0})
    log.close()
    records = read_metrics(directory)
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 0.5), (3, 7.0)]
    assert records[0]["bad"] is None
    assert (tmp_path / "tensorboard").is_dir()


def test_a_directory_belongs_to_one_configuration_once_training_has_begun(tmp_path):
    workdir = open_workdir(tmp_path / "run", config())
    assert json.loads((workdir / "run.json").read_text())["seed"] == 1
    # No step was finished yet: a corrected configuration may take the place.
    (workdir / "metrics.jsonl").write_text("")
    (workdir / "checkpoints").mkdir()
    open_workdir(workdir, config(seed=2))
    (workdir / "metrics.jsonl").write_text("{}\n")
    open_workdir(workdir, config(seed=2))
    open_workdir(workdir, config(seed=2, loop={"save_every": 99}))
    with pytest.raises(UserError, match=r"run\.json: .*\(optimizer\.peak, seed\); e\.g\. optimizer\.peak was 0\.1"):
        open_workdir(workdir, config(optimizer={"peak": 0.2}))


def test_checkpoints_of_an_unknown_run_are_not_adopted(tmp_path):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has checkpoints or metrics but no run\.json"):
        open_workdir(tmp_path, config())


def test_rollouts_belong_to_a_step_and_to_what_changes_numbers():
    assert run_fingerprint(config(), 3, "d") == run_fingerprint(config(loop={"save_every": 5}), 3, "d")
    assert run_fingerprint(config(), 3, "d") != run_fingerprint(config(), 4, "d")
    assert run_fingerprint(config(), 3, "d") != run_fingerprint(config(), 3, "e")
    assert run_fingerprint(config(), 3, "d") != run_fingerprint(config(seed=5), 3, "d")
