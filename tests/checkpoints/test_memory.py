"""A conversion holds a leaf, not a checkpoint."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.checkpoints.tiny_hf import BFLOAT16, random_tensors, write_checkpoint
from tests.models.tiny import tiny_raw

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# VmHWM is the peak of resident memory of this program image; ru_maxrss would begin with the parent's.
PROGRAM = """
import sys
from vibethinker_jax.checkpoints.convert import hf_to_orbax, orbax_to_hf
if sys.argv[1] != "import":
    {"in": hf_to_orbax, "out": orbax_to_hf}[sys.argv[1]](*sys.argv[2:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_bytes(*arguments: str) -> int:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"VmHWM:\s+(\d+) kB", output)[1]) * 1024


@pytest.mark.slow
def test_peak_memory_is_that_of_the_program_and_about_one_leaf(tmp_path: pathlib.Path) -> None:
    # 24 layers of 2 * 3 * 768 * 3072 bytes and a little: 350 MB, of which each MLP leaf is 113 MB.
    raw = tiny_raw(vocab_size=5000, hidden_size=768, intermediate_size=3072, num_hidden_layers=24)
    tensors = random_tensors(raw, BFLOAT16, seed=0, any_bits=True)
    size, leaf = sum(tensor.nbytes for tensor in tensors.values()), 24 * 768 * 3072 * 2
    source = write_checkpoint(tmp_path / "source", tensors, raw, shards=3)
    del tensors
    assert size > 3 * leaf
    base = peak_bytes("import")
    for direction, paths in (("in", (source, tmp_path / "policy")), ("out", (tmp_path / "policy", tmp_path / "back"))):
        peak = peak_bytes(direction, *map(str, paths))
        assert peak - base < 2 * leaf + 150e6, f"{direction}: {(peak - base) / 1e6:.0f} MB over the program itself"
        assert peak < 1.3 * size + 2**30
