"""`vibethinker plan` as users run it: programs of a small model, compiled for TPUs that are not there."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.models.tiny import tiny_raw

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

REPOSITORY = pathlib.Path(__file__).parents[2]
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LENGTH = 4, 256, 512, 4, 2, 128, 1024, 1024
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
}
GIBI = 1 << 30


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """plan(config, topology, *overrides) -> (exit code, parsed output or error text) of the verb in a new process."""
    home = tmp_path_factory.mktemp("plans")
    architecture = home / "config.json"
    architecture.write_text(json.dumps(tiny_raw(**SHAPE)))

    def run(config: str, topology: str, *overrides: str) -> tuple[int, Any]:
        command = [sys.executable, "-m", "vibethinker_jax.cli", "plan", "--json", "--topology", topology]
        command += ["--config", f"configs/{config}", f"--config.model.architecture={architecture}"]
        command += [f"--config.sequence_length={LENGTH}", "--config.model.max_position_embeddings=0", *overrides]
        environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, json.loads(done.stdout) if done.returncode == 0 else done.stderr

    return run


SFT = (
    "--config.attention.backend=dense",
    "--config.remat=full",
    "--config.mesh.fsdp=4",
    "--config.mesh.context=1",
    "--config.model.head_chunk=256",  # several chunks, so that the head is recomputed too
)


@pytest.fixture(scope="session")
def sft(plan: Any) -> dict[str, Any]:
    code, result = plan("sft_stage1.py", "v5e:2x2", *SFT, "--config.global_batch_rows=4")
    assert code == 0, result
    return result


def test_the_object_says_what_was_planned(sft: dict[str, Any]) -> None:
    assert (sft["config"], sft["topology"], sft["chips"]) == ("configs/sft_stage1.py", "v5e:2x2", 4)
    assert sft["mesh"] == {"replica": 1, "fsdp": 4, "context": 1, "tensor": 1}
    assert sft["hbm_bytes"] == 15.75 * GIBI
    assert list(sft["steps"]) == ["sft"]


def test_executed_flops_are_those_of_the_model_with_recomputation(sft: dict[str, Any]) -> None:
    """Each chip has a row. Per layer: the forward pass, it again but for the last product, and twice it backward.

    Attention: two products forward, two again, five backward, whose first makes the scores once more.
    """
    projections = 2 * LENGTH * HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    attention_product = 2 * LENGTH**2 * HEADS * HEAD_DIM
    product = 2 * LENGTH * HIDDEN * MLP
    head = 2 * LENGTH * HIDDEN * VOCABULARY
    expected = LAYERS * (4 * (projections + 3 * product) - product + (2 + 2 + 5) * attention_product) + 4 * head
    assert sft["steps"]["sft"]["executed_flops"] == pytest.approx(expected, rel=0.01)


def test_memory_counts_parameters_and_moments_once(sft: dict[str, Any]) -> None:
    step = sft["steps"]["sft"]
    state = step["held_bytes"]["parameters"] + step["held_bytes"]["moments"]
    assert step["held_bytes"]["moments"] == pytest.approx(2 * step["held_bytes"]["parameters"], rel=0.01)
    batch = LENGTH * 4 * 5  # five arrays of four bytes
    assert step["argument_bytes"] == pytest.approx(state + batch, rel=0.02)
    assert step["fits"]


def test_estimates_follow_from_each_other(sft: dict[str, Any]) -> None:
    step = sft["steps"]["sft"]
    assert step["tokens"] == 4 * LENGTH
    assert step["tokens_per_second_per_chip"] == pytest.approx(LENGTH / step["estimated_seconds"])
    assert step["mfu"] == pytest.approx(step["model_flops"] / step["estimated_seconds"] / 197e12)
    assert step["estimated_seconds"] >= step["executed_flops"] / 197e12
    assert step["compile_seconds"] > 0


def test_weights_are_gathered_and_gradients_scattered_over_fsdp(sft: dict[str, Any]) -> None:
    by_axis = sft["steps"]["sft"]["collective_bytes_by_axis"]
    assert set(by_axis) == {"fsdp"}
    layer = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * MLP
    # bfloat16 weights of every layer, once forward and once backward
    assert by_axis["fsdp"]["all-gather"] >= 2 * LAYERS * layer * 2


def test_a_plan_that_was_made_is_not_compiled_again(plan: Any, sft: dict[str, Any]) -> None:
    code, again = plan("sft_stage1.py", "v5e:2x2", *SFT, "--config.global_batch_rows=4")
    assert code == 0
    assert again == sft  # to the digit: compile_seconds would differ


def test_accumulation_adds_an_accumulator_and_repeats_the_micro_batch(plan: Any, sft: dict[str, Any]) -> None:
    code, result = plan("sft_stage1.py", "v5e:2x2", *SFT, "--config.global_batch_rows=32")
    assert code == 0, result
    step, single = result["steps"]["sft"], sft["steps"]["sft"]
    assert step["micro_batches"] == 8
    assert step["held_bytes"]["accumulator"] == step["held_bytes"]["parameters"]
    assert step["programs"]["add"]["beside_bytes"] == {"moments": step["held_bytes"]["moments"]}
    assert step["model_flops"] == 8 * single["model_flops"]
    assert step["executed_flops"] == pytest.approx(8 * single["executed_flops"], rel=0.01)
    assert step["peak_bytes"] >= sum(step["held_bytes"].values())


def test_a_rollout_is_planned_beside_the_trainer(plan: Any) -> None:
    code, result = plan(
        "math_rl.py",
        "v5e:2x2",
        "--config.mesh.fsdp=4",
        "--config.mesh.context=1",
        "--config.attention.backend=dense",
        "--config.rollout.max_slots=8",
        "--config.rollout.max_new_tokens=512",
    )
    assert code == 0, result
    assert list(result["steps"]) == ["mgpo", "prefill", "decode"]
    decode = result["steps"]["decode"]
    cache = 2 * LAYERS * 8 * LENGTH * KV_HEADS * HEAD_DIM * 2 // 4  # keys and values, 8 slots over 4 chips, bfloat16
    assert decode["held_bytes"]["slot cache"] == pytest.approx(cache, rel=0.001)  # but for alignment
    assert decode["tokens"] == 8 * 16  # a burst
    trainer = result["steps"]["mgpo"]["held_bytes"]
    beside = decode["programs"]["decode"]["beside_bytes"]
    assert (beside["parameters"], beside["moments"]) == (trainer["parameters"], trainer["moments"])
    assert decode["peak_bytes"] >= sum(decode["held_bytes"].values())
    assert result["steps"]["prefill"]["peak_bytes"] >= sum(decode["held_bytes"].values())
    # 2 FLOPs per parameter and token, for two slots per chip, 16 steps
    assert decode["executed_flops"] >= 2 * 16 * 2 * VOCABULARY * HIDDEN


def test_what_does_not_fit_is_a_verdict_and_no_crash(plan: Any) -> None:
    code, result = plan(
        "sft_stage1.py",
        "v5e:1x1",
        "--config.model.architecture=models/qwen2.5-coder-3b.json",
        "--config.attention.backend=dense",
        "--config.global_batch_rows=1",
        "--config.mesh.context=1",
    )
    assert code == 0, result
    step = result["steps"]["sft"]
    assert not step["fits"]
    assert step["peak_bytes"] > 12 * 3.08e9  # parameters and moments alone
    assert step["estimated_seconds"] is None
    assert step["mfu"] is None


def test_a_mesh_that_the_chips_cannot_form_is_refused_with_topologies_that_can(plan: Any) -> None:
    code, error = plan("sft_stage1.py", "v5e:2x2", "--config.mesh.context=16")
    assert code == 2
    assert "v5e:2x2 has 4 chips" in error
    assert "v5e:4x4, v5p:2x2x4, v6e:4x4" in error


def test_every_listed_topology_exists_and_its_memory_is_known() -> None:
    script = (
        "from vibethinker_jax.planning import topology as t\n"
        "t.set_environment()\n"
        "import json\n"
        "print(json.dumps({n: (len(o.devices), o.hbm_bytes) for n in t.NAMES for o in [t.open_topology(n)]}))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    sizes = {"v5e": 16, "v5p": 96, "v6e": 32}
    for name, (chips, memory) in json.loads(output).items():
        chip, _, shape = name.partition(":")
        product = 1
        for size in shape.split("x"):
            product *= int(size)
        assert chips == product
        # The compiler keeps some of the chip's memory for itself.
        assert 0.96 * sizes[chip] * GIBI < memory < sizes[chip] * GIBI
