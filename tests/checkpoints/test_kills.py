"""SIGKILL at any moment of a conversion or of a run's saving leaves nothing half-written that loads."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints.tiny_hf import BFLOAT16, assert_same_bytes, random_tensors, read_checkpoint, write_checkpoint
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
from vibethinker_jax.checkpoints.store import detect_format
from vibethinker_jax.checkpoints.training_store import TrainingStore
from vibethinker_jax.errors import UserError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def start(what: str, fatal: int, *paths: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.checkpoints.dying_child", what, str(fatal), *map(str, paths)]
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)


def operations(what: str, *paths: pathlib.Path) -> int:
    """How many file operations there are when nothing dies."""
    output, _ = start(what, 0, *paths).communicate()
    return int(re.search(r"operations: (\d+)", output)[1])


def dies_at(what: str, fatal: int, *paths: pathlib.Path) -> bool:
    """Whether it died; background threads of Orbax make the number of operations vary a little."""
    process = start(what, fatal, *paths)
    process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode != 0


def assert_nothing_loads(*directories: pathlib.Path) -> None:
    for directory in directories:
        with pytest.raises(UserError):
            detect_format(directory)


@pytest.mark.parametrize("direction", ["hf_to_orbax", "orbax_to_hf", "hf_to_orbax_in_place", "orbax_to_hf_in_place"])
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: pathlib.Path, direction: str) -> None:
    tensors = random_tensors(tiny_raw(), BFLOAT16, seed=0)
    source = write_checkpoint(tmp_path / "in" / "source", tensors)
    if direction.startswith("orbax_to_hf"):
        hf_to_orbax(source, tmp_path / "in" / "policy")
        source = tmp_path / "in" / "policy"
    out = tmp_path / "out"
    out.mkdir()
    total = operations(direction, source, out / "whole")
    assert detect_format(out / "whole") == ("orbax" if direction.startswith("hf") else "hf")
    shutil.rmtree(out / "whole")
    # The last operations are the dangerous ones; in place, the very last one creates the file that makes it load.
    moments = [random.Random(direction).randrange(2, total - 4), total - 3, total - 1, total]
    deaths = 0
    for moment in moments:
        died = dies_at(direction, moment, source, out / "destination")
        if died:
            assert_nothing_loads(out / "destination", out / "destination.partial")
        if direction.endswith("in_place") or not died:
            shutil.rmtree(out / "destination")  # as the error tells the user who tries again
        deaths += died
    assert deaths >= 3
    if not direction.endswith("in_place"):
        again = hf_to_orbax if direction == "hf_to_orbax" else orbax_to_hf
        again(source, out / "destination")
        assert [path.name for path in out.iterdir()] == ["destination"]
        back = out / "destination"
        if direction == "hf_to_orbax":
            orbax_to_hf(back, tmp_path / "back")
            back = tmp_path / "back"
        assert_same_bytes(read_checkpoint(back), tensors)


def test_a_killed_run_resumes_from_a_whole_step(tmp_path: pathlib.Path) -> None:
    total = operations("train", tmp_path / "count" / "run")
    workdir = tmp_path / "out" / "run"
    workdir.parent.mkdir()
    generator = random.Random(0)
    reached = 0
    for _ in range(3):
        assert dies_at("train", generator.randrange(total // 3, total // 2), workdir)
        abstract = ({"a": jnp.zeros((64, 64)), "b": jnp.zeros(3)}, {"count": jnp.int32(0)})
        with TrainingStore(workdir) as store:
            step = store.latest_step()
            if step is None:
                continue
            params, state, metadata = store.restore(None, abstract)
        assert step >= reached, "a complete step was lost"
        reached = step
        np.testing.assert_array_equal(params["a"], np.full((64, 64), step))
        np.testing.assert_array_equal(params["b"], np.full(3, step))
        assert (int(state["count"]), metadata) == (step, {"step": step})
    assert reached > 0
    assert start("train", 0, workdir).wait() == 0
    with TrainingStore(workdir) as store:
        assert store.latest_step() >= 5
    assert not list(workdir.glob("checkpoints/*tmp*"))
