import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "kernel_profile.py"

# A grid's loop of bundles 1 to 14: a branch taken once per row (3 bundles, around another of 1), a masked and an
# unmasked step, each with a matmul, 3 and 2 bundles; a bundle that goes on over two lines.
SCHEDULE = """
= control target key start
     0   :  { %1 = smov.u32 0 } /* Start region 1 */
   0x1 LB: > { %2 = sld } /* Start region 10 :: Start region 2 */
   0x2   : > { %3 = sbr.rel (%p1) target = $region4 } /* Start region 3 */
   0x3   : > { %4 = sbr.rel (%p2) target = $region5 }
   0x4   : > { %5 = vst [vmem:0] } /* Start/End empty region 5 :: End region 3 */
   0x5 PF: > { %6 = sbr.rel (%p3) target = $region7 } /* Start/End empty region 4 */
   0x6   : > { %7 = vcmp.gt.s32 %v1, %v2  ;;  %8 = vcmp.le.s32 %v1, %v2 } /* Start region 6 */
   0x7   : > { %9 = vmatmul.bf16.gmra.mxu0 %v3
second line of the same bundle: 1 */ }
   0x8 PF: > { %10 = sbr.rel (!%p4) target = $region9 } /* Start/End empty region 7 */
   0x9   : > { %11 = vmatmul.bf16.gmra.mxu1 %v3 } /* Start region 8 */
   0xa PF: > { %12 = sadd } /* Start/End empty region 9 */
   0xb   : > { %13 = dma.hbm_to_vmem }
   0xc   : > { %14 = dma.done }
   0xd   : > { %15 = sadd }
   0xe   :  { %16 = sbr.rel (!%p5) target = $region10 }
   0xf   :  { %17 = shalt }
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("kernel_profile", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_schedule_is_split_into_steps_rows_and_control(tool):
    profile = tool.profile(SCHEDULE, "v5e:2x2", "forward", 2, 512, 1024)
    assert (profile.masked, profile.unmasked, profile.rows) == (3, 2, 3)
    # The loop has 14 bundles.
    assert profile.control == 14 - 3 - 2 - 3
    assert profile.whole == 16 - 2
    # 2 matmuls of 2 * 512 * 1024 * 128 FLOPs, 131,072 of them per cycle.
    assert profile.bound == 2048
    assert profile.cost == 2048 + 6
    assert profile.share == round(2048 / 3, 3)


def test_a_kernel_with_one_path_counts_whole_and_cost_is_per_unit_of_scores(tool):
    one_path = SCHEDULE.replace("vmatmul.bf16.gmra.mxu1", "vadd.f32")
    profile = tool.profile(one_path, "v5p:2x2x1", "stock dQ", 3, 1024, 2048)
    assert profile.masked == profile.unmasked == 3
    assert profile.rows == 3 + 2
    assert profile.whole == 16
    # Four units of 512 x 1,024: the bound of each and a quarter of the control of 6.
    assert profile.cost == round(3072 + 6 / 4)


def test_blocks_and_topologies_that_it_cannot_profile_are_refused():
    for arguments, message in ((["--blocks", "512"], "512x1024"), (["--topology", "v9:2"], "v5e, v5p, v6e")):
        done = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.slow
def test_our_kernels_cost_less_than_stock_on_v5e():
    command = [sys.executable, TOOL, "--topology", "v5e:2x2", "--blocks", "512x1024", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    profiles = {p["kernel"]: p for p in json.loads(done.stdout)["profiles"]}
    # Whole programs of jax 0.10.2's splash kernels under libtpu 0.0.52.
    for kernel, bundles in (("stock forward", 3133), ("stock dK, dV", 4458), ("stock dQ", 3100)):
        assert profiles[kernel]["whole"] == pytest.approx(bundles, rel=0.05)
    assert profiles["forward"]["cost"] <= profiles["stock forward"]["cost"]
    assert profiles["backward"]["whole"] <= 6200
    assert profiles["backward"]["cost"] <= 0.75 * (profiles["stock dK, dV"]["cost"] + profiles["stock dQ"]["cost"])
