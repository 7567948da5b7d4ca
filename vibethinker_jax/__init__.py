"""VibeThinker-3B's Spectrum-to-Signal recipe in JAX.

    import vibethinker_jax as vt

    policy = vt.load("checkpoint")
    engine = vt.RolloutEngine(policy, max_slots=8, max_length=4096)
    [[completion]] = engine.generate(["What is 2 + 2?"], vt.SamplingParams(max_new_tokens=512))
    vt.verify({"verifier": {"kind": "math", "answer": "4"}}, completion.text)

Names are imported when they are first used: `vt.verify` and `vt.load_problems` import no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vibethinker_jax import objectives
    from vibethinker_jax.data.records import Example, Problem, load_examples, load_problems
    from vibethinker_jax.data.render import render
    from vibethinker_jax.data.tokenizer import Tokenizer
    from vibethinker_jax.errors import UserError
    from vibethinker_jax.evaluation.compare import compare
    from vibethinker_jax.evaluation.evaluate import evaluate
    from vibethinker_jax.models.config import Qwen2Config
    from vibethinker_jax.models.policy import Policy, load
    from vibethinker_jax.parallel.mesh import make_mesh
    from vibethinker_jax.rewards import Verdict, VerifierPool, verify
    from vibethinker_jax.rollout.engine import RolloutEngine
    from vibethinker_jax.rollout.params import Completion, SamplingParams

_HOMES = {
    "Completion": "rollout.params",
    "Example": "data.records",
    "Policy": "models.policy",
    "Problem": "data.records",
    "Qwen2Config": "models.config",
    "RolloutEngine": "rollout.engine",
    "SamplingParams": "rollout.params",
    "Tokenizer": "data.tokenizer",
    "UserError": "errors",
    "Verdict": "rewards",
    "VerifierPool": "rewards",
    "compare": "evaluation.compare",
    "evaluate": "evaluation.evaluate",
    "load": "models.policy",
    "load_examples": "data.records",
    "load_problems": "data.records",
    "make_mesh": "parallel.mesh",
    "objectives": None,
    "render": "data.render",
    "verify": "rewards",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home is None:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
