"""A real Qwen2.5-Coder-0.5B-Instruct checkpoint, built once per machine from what shared/ provides."""

import os
import pathlib
import subprocess
import sys

import pytest

import vibethinker_jax as vt


@pytest.fixture(scope="session")
def checkpoint(shared_dir) -> pathlib.Path:
    """Its Hugging Face directory: VIBETHINKER_CHECKPOINT, or fetched into the user's cache."""
    if "VIBETHINKER_CHECKPOINT" in os.environ:
        return pathlib.Path(os.environ["VIBETHINKER_CHECKPOINT"])
    script = shared_dir / "tools" / "fetch_checkpoint.py"
    if not script.exists():
        pytest.skip(f"no real checkpoint: {script} is absent (set VIBETHINKER_CHECKPOINT to a Hugging Face directory)")
    directory = pathlib.Path.home() / ".cache" / "vibethinker_jax" / "qwen2.5-coder-0.5b-instruct"
    lock = directory.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)  # the workers of one test run build it once
        subprocess.run([sys.executable, str(script), str(directory)], check=True)
    return directory


@pytest.fixture(scope="session")
def policy(checkpoint):
    return vt.load(checkpoint)


@pytest.fixture(scope="session")
def reference(checkpoint):
    torch = pytest.importorskip("torch", reason="PyTorch is in the test extra on Python 3.11")
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(policy, shared_dir):
    """Token ids of real GSM8K and AIME25 prompts, in the checkpoint's chat template."""
    files = shared_dir / "data" / "gsm8k" / "train.jsonl", shared_dir / "data" / "math" / "aime25.parquet"
    return [policy.tokenizer.encode_chat(p.prompt) for file in files for p in vt.load_problems(file)[:4]]


@pytest.fixture(scope="session")
def longest_prompt(policy, shared_dir):
    """Token ids of the longest AIME25 problem: 874 tokens."""
    problems = vt.load_problems(shared_dir / "data" / "math" / "aime25.parquet")
    return max((policy.tokenizer.encode_chat(problem.prompt) for problem in problems), key=len)
