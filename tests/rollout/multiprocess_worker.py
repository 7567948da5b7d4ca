"""One of two processes with four CPU devices each; prints what its engine returns as JSON."""

import json
import sys

import jax

from tests.rollout.conftest import RAW_CONFIG, StandInPolicy, random_params
from vibethinker_jax.models.config import Qwen2Config
from vibethinker_jax.models.parameters import parameter_shardings
from vibethinker_jax.parallel.mesh import make_mesh
from vibethinker_jax.parallel.rules import Placement
from vibethinker_jax.rollout.engine import RolloutEngine
from vibethinker_jax.rollout.params import SamplingParams


def main(process: int, coordinator: str, prompts: list[list[int]], settings: list[dict]) -> None:
    jax.distributed.initialize(coordinator, num_processes=2, process_id=process)
    config = Qwen2Config.from_hf(RAW_CONFIG, source="test")
    placement = Placement(make_mesh(fsdp=4, tensor=2))
    params = jax.tree.map(
        lambda array, sharding: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]),
        jax.device_get(random_params(config, seed=0)),
        parameter_shardings(config, placement),
    )
    assert not params["embed"]["table"].is_fully_addressable
    policy = StandInPolicy(config, params, placement=placement)
    engine = RolloutEngine(policy, max_slots=8, max_length=44, prefill_chunk=8, prefill_batch=3, decode_burst=4)
    each = [SamplingParams(**one) for one in settings]

    results = engine.generate(prompts, each)
    engine.submit(prompts, SamplingParams(n=3, max_new_tokens=5))
    doomed = engine.submit(prompts[:1], SamplingParams(n=9))
    order = []
    for sample in engine.completions():
        engine.cancel(doomed)
        order.append((sample.prompt_index, sample.sample_index, sample.completion.tokens))
    engine.update_weights(policy)
    again = engine.generate(prompts, each)
    assert [[c.tokens for c in samples] for samples in again] == [[c.tokens for c in samples] for samples in results]
    fields = [[(c.text, c.tokens, c.log_probs, c.finish_reason) for c in samples] for samples in results]
    print(json.dumps({"results": fields, "order": order}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *json.loads(sys.argv[3]))
