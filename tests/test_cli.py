"""The command line: help, exit codes, and messages that name what is wrong."""

import json
import subprocess
import sys

import pytest
from etils import epath

from tests.conftest import REPOSITORY
from vibethinker_jax.cli import main
from vibethinker_jax.configuration import read_config
from vibethinker_jax.data.arithmetic import generate, write_model_directory
from vibethinker_jax.errors import UserError
from vibethinker_jax.models.policy import initialise

VERBS = [
    ["train"],
    ["sample"],
    ["eval"],
    ["compare"],
    ["status"],
    ["convert", "hf-to-orbax"],
    ["convert", "orbax-to-hf"],
    ["data", "arithmetic"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*verb, "--help"])
    assert stopped.value.code == 0
    assert f"example: vibethinker {' '.join(verb)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--workdir", "w"], "--config is missing"),
        (["train", "--workdir", "w", "--config", "configs/none.py"], "--config configs/none.py: no such file"),
        (["train", "--workdir", "w", "--config", "configs/sft_stage1.py"], "config.model.checkpoint is empty"),
        (
            ["train", "--workdir", "w", "--config=configs/sft_stage1.py", "--config.optimizer.peek=1"],
            "did you mean optimizer.p",
        ),
        (["train", "--workdir", "w", "--config=configs/sft_stage1.py", "--config.seed=x"], "--config.seed=x"),
        (["train", "--workdir", "w", "--config=configs/demo.py:rl"], "choose one of sft, mgpo, real"),
        (["eval", "--checkpoint", "nowhere", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["eval", "--checkpoint", "nowhere", "--data", "x", "--benchmark", "aime99"], "'aime99'"),
        (["sample", "--checkpoint", "nowhere", "--prompt", "1"], "nowhere: no such directory"),
        (["sample", "--checkpoint", "nowhere"], "give either --prompt TEXT or --input FILE"),
        (["sample", "--checkpoint", "nowhere", "--prompt", "1", "--mesh", "rows=2"], "--mesh is 'rows=2'"),
        (["convert", "hf-to-orbax", "nowhere", "out"], "nowhere"),
        (["convert", "orbax-to-hf", "nowhere", "out"], "nowhere"),
        (["status", "nowhere"], "nowhere: has no run.json"),
        (["compare", "nowhere", "elsewhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_exits_with_2_and_names_it(arguments, message, capsys, monkeypatch, tmp_path):
    arguments = [a.replace("configs/", f"{REPOSITORY}/configs/") for a in arguments]
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message.replace("configs/none", f"{REPOSITORY}/configs/none") in errors
    assert errors.startswith(f"vibethinker {arguments[0]}: ")
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    """The demo's model with random weights, as a Hugging Face directory, and some of its problems."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "bare").mkdir()
    write_model_directory(epath.Path(directory / "bare"))
    initialise(directory / "bare", seed=0).save(directory / "hf", "hf")
    lines = [json.dumps(chain.problem()) + "\n" for chain in generate(5, 0, held_out=True)]
    (directory / "problems.jsonl").write_text("".join(lines))
    return directory


def test_verbs_work_together_on_one_checkpoint(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf, problems = str(tiny_checkpoint / "hf"), str(tiny_checkpoint / "problems.jsonl")
    assert main(["convert", "hf-to-orbax", hf, "orbax"]) == 0
    assert main(["convert", "orbax-to-hf", "orbax", "back"]) == 0
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (tiny_checkpoint / "hf" / name).read_bytes()
    capsys.readouterr()
    assert main(["sample", "--checkpoint", hf, "--prompt", "1+1=?", "--max-new-tokens", "5", "--samples", "2"]) == 0
    arguments = ["--input", problems, "--output", "out.jsonl", "--max-new-tokens", "5", "--mesh", "fsdp=4,tensor=2"]
    assert main(["sample", "--checkpoint", "orbax", *arguments]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    for output, seed in (("a", "0"), ("b", "1")):
        arguments = ["--data", problems, "--limit", "3", "--samples", "2", "--output", output, "--seed", seed]
        assert main(["eval", "--checkpoint", hf, "--max-length", "40", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "3 problems x 2 samples" in shown
    assert "truncated" in shown
    assert main(["compare", "a", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == [0.0, 0.0]


def test_config_overrides_keep_the_type_of_the_field():
    path = str(REPOSITORY / "configs" / "math_rl.py")
    config = read_config(
        ["--config", path, "--config.seed=7", "--config.mgpo.gamma=2", "--config.mgpo.token_band=(0.5, 2.0)"]
    )
    assert (config.seed, config.mgpo.gamma, config.mgpo.token_band) == (7, 2.0, (0.5, 2.0))
    assert isinstance(config.mgpo.gamma, float)
    with pytest.raises(UserError, match="write overrides as"):
        read_config(["--config", path, "seed=7"])


@pytest.mark.parametrize("stage", ["sft", "mgpo", "real"])
def test_the_demo_changes_only_fields_that_the_stages_have(stage):
    demo = read_config([f"--config={REPOSITORY}/configs/demo.py:{stage}"])
    base = read_config([f"--config={REPOSITORY}/configs/{'sft_stage1' if stage == 'sft' else 'math_rl'}.py"])

    def shape(tree):
        return {k: shape(v) if isinstance(v, dict) else type(v) for k, v in tree.items()}

    assert shape(demo.to_dict()) == shape(base.to_dict())


def test_importing_the_package_and_verifying_import_no_jax():
    program = (
        "import sys, vibethinker_jax as vt\n"
        "problem = {'verifier': {'kind': 'math', 'answer': '4'}}\n"
        "print(vt.verify(problem, 'so \\\\boxed{4}').correct, 'jax' in sys.modules)\n"
        "vt.SamplingParams, vt.load_problems, vt.Verdict\n"
        "print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert run.stdout.split() == ["True", "False", "False"]


def test_every_public_name_resolves():
    import vibethinker_jax as vt

    for name in vt.__all__:
        assert getattr(vt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vt.nothing


def test_status_as_json(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps({"stage": "sft"}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n{"step": 3, "lo')
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    assert main(["status", str(tmp_path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["steps_done"], status["saved_steps"], status["metrics"][0]["loss"]) == (2, [2], 2.5)
    assert main(["status", str(tmp_path)]) == 0
    assert "2.5" in capsys.readouterr().out
