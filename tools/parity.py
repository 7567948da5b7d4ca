"""How far our forward pass is from transformers' on real weights and real prompts, in float32.

python tools/parity.py --checkpoint HF_DIR [--data FILE ...] [--prompts N] [--greedy N]

Prints the largest difference of logits, the mean KL divergence per position (softmax and sum in float64), and whether
greedy decoding by the rollout engine gives transformers' tokens. Exits with 1 if a bound is exceeded. Needs the `test`
extra.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import vibethinker_jax as vt

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("VIBETHINKER_SHARED", REPOSITORY.parent / "shared")) / "data"
MAX_LOGIT_DIFFERENCE = 2e-4
MAX_MEAN_KL = 1e-9


def main() -> int:
    options = parse()
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    policy = vt.load(options.checkpoint)
    prompts = [
        policy.tokenizer.encode_chat(problem.prompt)
        for path in options.data
        for problem in vt.load_problems(path)[: options.prompts]
    ]
    largest, divergences = 0.0, []
    for tokens in prompts:
        ours = np.asarray(policy.logits(np.array([tokens])))[0]
        with torch.no_grad():
            theirs = reference(torch.tensor([tokens])).logits[0].numpy()
        largest = max(largest, float(np.abs(ours - theirs).max()))
        divergences.append(kl_divergence(theirs, ours))
    mean_kl = float(np.concatenate(divergences).mean())
    positions = sum(map(len, prompts))
    print(f"prompts {len(prompts)}, positions {positions}, longest {max(map(len, prompts))} tokens")
    print(f"largest logit difference {largest:.3g} (bound {MAX_LOGIT_DIFFERENCE:g})")
    print(f"mean KL(transformers || ours) {mean_kl:.3g} nats per position (bound {MAX_MEAN_KL:g})")

    same = 0
    engine = vt.RolloutEngine(policy, max_slots=1, max_length=max(map(len, prompts)) + options.greedy)
    params = vt.SamplingParams(temperature=0.0, max_new_tokens=options.greedy, stop_token_ids=())
    chosen = prompts[:: max(1, len(prompts) // 2)][:2]
    for tokens, [completion] in zip(chosen, engine.generate(chosen, params), strict=True):
        with torch.no_grad():
            theirs = reference.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                # Fields left out are taken from the checkpoint, whose repetition penalty would not be greedy decoding.
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=options.greedy,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    repetition_penalty=1.0,
                ),
            )[0, len(tokens) :].tolist()
        same += completion.tokens == theirs
    print(f"greedy decoding: {same} of {len(chosen)} prompts give the same {options.greedy} tokens")
    return int(largest > MAX_LOGIT_DIFFERENCE or mean_kl > MAX_MEAN_KL or same < len(chosen))


def kl_divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """float64[positions]: KL(softmax(reference) || softmax(logits)) in nats, of logits[positions, vocab]."""
    p, q = (log_softmax(x.astype(np.float64)) for x in (reference, logits))
    return (np.exp(p) * (p - q)).sum(axis=-1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face directory")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[str(SHARED / "gsm8k" / "train.jsonl"), str(SHARED / "math" / "aime25.parquet")],
        help="files of problems (default: GSM8K and AIME25 beside the checkout)",
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts per file (default 4)")
    parser.add_argument("--greedy", type=int, default=64, help="tokens of greedy decoding (default 64)")
    options = parser.parse_args()
    for path in options.data:
        if not pathlib.Path(path).exists():
            parser.error(f"{path}: no such file; name files of problems with --data")
    return options


if __name__ == "__main__":
    sys.exit(main())
