"""The demo: a tiny Qwen2 learns arithmetic on two CPU cores. launch/demo.sh runs these in turn.

--config configs/demo.py:sft    SFT from random weights; its data and length are fixed here, for every seed
--config configs/demo.py:mgpo   MGPO from there
--config configs/demo.py:real   two MGPO steps on real weights, small enough for a CPU
"""

import pathlib
import runpy

from ml_collections import ConfigDict

from vibethinker_jax.errors import UserError


def get_config(stage: str = "") -> ConfigDict:
    """The named configuration: a stage's own, with what differs for the demo."""
    stages = {"sft": sft, "mgpo": mgpo, "real": real}
    if stage not in stages:
        raise UserError(f"--config configs/demo.py:{stage}: choose one of {', '.join(stages)}")
    return stages[stage]()


def sft() -> ConfigDict:
    config = _base("sft_stage1")
    config.model.update(TINY_MODEL, initialise="random")
    # 8,000 worked solutions, two passes: fixed for every seed, whatever accuracy that gives.
    config.update(sequence_length=256, global_batch_rows=2, micro_batch_rows=2, max_segments=16, remat="none")
    config.data.update(epochs=2)
    # chosen: small batches and a high rate learn fastest per second at this size
    config.optimizer.update(peak=2e-3, floor=2e-4, warmup_fraction=0.02, weight_decay=0.01)
    config.loop.update(save_every=500, keep=1)
    return config


def mgpo() -> ConfigDict:
    config = _base("math_rl")
    config.update(steps=120, prompts_per_step=16)
    config.update(sequence_length=256, micro_batch_rows=8, max_segments=16, remat="none")
    config.model.update(TINY_MODEL)
    config.rollout.update(samples=8, max_new_tokens=64, max_slots=128)
    config.mgpo.update(only_with_signal=True)
    config.verifier.update(workers=1)  # integer answers are compared in this process
    config.optimizer.update(peak=2e-4, floor=2e-5, warmup_fraction=0.05)
    config.loop.update(save_every=40, keep=1)
    return config


def real() -> ConfigDict:
    config = _base("math_rl")
    config.update(steps=2, prompts_per_step=2)
    config.update(sequence_length=512, micro_batch_rows=1, max_segments=8, remat="full")
    config.model.update(max_position_embeddings=0, compute_dtype="float32", head_chunk=128, mlp_chunks=1)
    # Eight responses per step, long enough for most grade-school problems: minutes on a CPU.
    config.rollout.update(samples=4, max_new_tokens=320, max_slots=8)
    config.verifier.update(workers=1, require_thinking=False)  # the instruct model does not write <think>
    config.loop.update(save_every=2, keep=1)
    return config


TINY_MODEL = {
    "max_position_embeddings": 0,
    "compute_dtype": "float32",
    "head_chunk": 128,
    "mlp_chunks": 1,
}


def _base(name: str) -> ConfigDict:
    """A stage's configuration on one device: none of this is big enough to share."""
    config = runpy.run_path(str(pathlib.Path(__file__).with_name(f"{name}.py")))["get_config"]()
    config.mesh.update(devices=1)
    return config
