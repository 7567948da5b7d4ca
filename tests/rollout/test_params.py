import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from vibethinker_jax.errors import UserError
from vibethinker_jax.rollout.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 1e-7),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 2),
        ("max_new_tokens", 0),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [3]),
        ("stop", "\ufffd"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        SamplingParams(**{field: value})


def test_values_are_normalised_and_frozen():
    params = SamplingParams(stop="end", stop_token_ids=np.array([7, 5, 7]), seed=np.uint64(2**63), n=np.int32(2))
    assert params.stop == ("end",)
    assert params.stop_token_ids == (7, 5)
    assert (params.seed, type(params.seed), params.n) == (2**63, int, 2)
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3


def test_parameters_and_schedule_import_no_jax():
    modules = "params, prompts, scheduler, stopping, ending"
    code = f"from vibethinker_jax.rollout import {modules}; import sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
