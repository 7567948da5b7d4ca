"""The recipe's stages: each reads a checkpoint and data, and writes a checkpoint, metrics and trajectories."""

from typing import Any

from etils import epath

from vibethinker_jax.errors import UserError

STAGES = ("sft", "mgpo")


def run_stage(config: Any, workdir: epath.PathLike) -> epath.Path:
    """Runs the stage that `config.stage` names in `workdir`, or continues it; returns the work directory."""
    name = config.get("stage")
    if name == "sft":
        from vibethinker_jax.stages.sft import run_sft

        return run_sft(config, workdir)
    if name == "mgpo":
        from vibethinker_jax.stages.reasoning_rl import run_mgpo

        return run_mgpo(config, workdir)
    raise UserError(f"config.stage is {name!r}; choose one of {', '.join(STAGES)}")
