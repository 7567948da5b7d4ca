import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "bench_attention.py"
SMALL = ["--length=512", "--devices=4", "--block=32", "--repeats=1", "--heads=2", "--kv-heads=1", "--head-dim=16"]


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def small():
    done = run(*SMALL)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def cells(text, name):
    """The numbers of a line of the table."""
    [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return [float(cell) for cell in line[len(name) :].replace("MiB", "").split()]


def test_every_way_to_attend_gives_the_dense_result(small):
    names = ("blockwise, one device", "... nothing skipped")
    names += tuple(f"{strategy}, {layout}" for strategy in ("gather", "ring") for layout in ("zigzag", "contiguous"))
    assert cells(small, "dense, one device")[:4] == [0, 0, 0, 0]
    for name in names:
        assert 0 < max(cells(small, name)[:4]) < 1e-5, name


def test_work_per_device_is_that_of_the_layout(small):
    # 16 x 16 blocks, of which 16 * 17 / 2 are causal: 136, or 34 for each of 4 devices.
    assert cells(small, "dense, one device")[6] == cells(small, "... nothing skipped")[6] == 256
    assert cells(small, "blockwise, one device")[6] == 136
    assert cells(small, "ring, zigzag")[6:8] == [34, 1]
    # The last device has rows 13 to 16 of blocks: 58 of them.
    assert cells(small, "gather, contiguous")[6:8] == [34, pytest.approx(58 / 34, abs=1e-3)]


def test_eight_documents_visit_their_own_blocks(small):
    # Each of two blocks: 8 * 3 of 136.
    assert "blocks of 8 documents (24) over causal blocks of one (136): 0.176, at most 0.2" in small
    assert "of all 256 blocks of the square: one document 0.531, 8 documents 0.094" in small


def test_a_bound_that_does_not_hold_is_an_error():
    # Documents of one block: 8 of 36 causal blocks, more than a fifth.
    done = run("--length=512", "--devices=4", "--block=64", *SMALL[3:])
    assert done.returncode == 1
    assert re.findall(r"^(ok|FAILED) ", done.stdout, re.MULTILINE) == ["ok", "ok", "FAILED"]


def test_a_row_that_blocks_do_not_cut_is_refused():
    done = run("--length=500")
    assert done.returncode == 2
    assert "use a multiple of 2 x devices x block = 2048" in done.stderr
