"""Two processes load, save and restore together what neither holds alone."""

import pathlib
import socket
import subprocess
import sys

from tests.checkpoints.tiny_hf import BFLOAT16, assert_same_bytes, random_tensors, read_checkpoint, write_checkpoint
from tests.models.tiny import tiny_raw
from vibethinker_jax.checkpoints.convert import orbax_to_hf

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_save_what_one_process_would(tmp_path: pathlib.Path) -> None:
    raw = tiny_raw(tie_word_embeddings=False)
    tensors = random_tensors(raw, BFLOAT16, seed=0)
    source = write_checkpoint(tmp_path / "source", tensors, raw, shards=3)
    command = [sys.executable, "-m", "tests.checkpoints.distributed_child", f"127.0.0.1:{free_port()}", "2"]
    processes = [
        subprocess.Popen(
            [*command, str(index), source, tmp_path],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    assert_same_bytes(read_checkpoint(tmp_path / "hf"), tensors)
    for name, step in (("policy", None), ("run", 3)):
        orbax_to_hf(tmp_path / name, tmp_path / f"{name}_hf", step)
        assert_same_bytes(read_checkpoint(tmp_path / f"{name}_hf"), tensors)
    assert not list(tmp_path.glob("*.partial"))
