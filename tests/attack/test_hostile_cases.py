"""The hostile files that were found to hurt, one by one: each is a sentence and exit code 2, or does no harm."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from headcode import ModelConfig, Transformer
from headcode.experiments.records import has_records
from headcode.nn import flops_per_token, forward_flops, save_model
from headcode.presets import override, preset
from headcode.sweep.status import is_finished, read_progress, result_row
from headcode.tasks import FuzzyLogic
from headcode.tasks.language.tokenizer import read_tokenizer
from headcode.train import Runtime, Trainer, read_run_config
from headcode.train.folder import read_environments
from tests.support.hostile_files import DEEP, NO_FILES, SMALL, attempt, seal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    Trainer(override(preset("logic-small"), **SMALL), run, runtime=Runtime(device="cpu", threads=1)).run()
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def refusal(*arguments):
    """The one sentence of a command that refuses."""
    end = attempt([str(argument) for argument in arguments])
    assert end.error is None and end.code == 2, end
    assert end.said.startswith("headcode: ") and end.said.count("\n") == 1 and len(end.said) < 3000, end
    return end.said


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "line",
    [
        "7",
        "[]",
        "null",
        '{"kind": "eval"}',
        '{"kind": "eval", "step": 4, "split": "iid"}',
        '{"kind": "eval", "step": "4", "split": "iid", "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": 4.0, "split": "iid", "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": -4, "split": "iid", "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": 1e30, "split": "iid", "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": 4, "split": ["iid"], "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": 4, "split": "\\u001b[2J", "loss": 1, "r2": 0.5}',
        '{"kind": "eval", "step": 4, "split": "iid", "loss": 1, "r2": "high"}',
        '{"kind": "eval", "step": 4, "split": "iid", "loss": 1, "r2": {"a": 1}}',
        '{"kind": ["eval"], "step": 4}',
        '{"kind": "train", "step": 4}',
        '{"kind": "eval", "step": 4, "split": "iid", "loss": 1, "r2": NaN}',
        '{"kind": "eval", "step": 4, "split": "iid", "loss": 1, "r2": 1e400}',
        '{"kind": "eval", "step": 4, "split": "iid", "loss": 1, "r2": ' + "9" * 400 + "}",
        DEEP,
    ],
)
def test_odd_records(run, line, tmp_path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    said = refusal("report", run, "--out", tmp_path / "page.html")
    number = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"metrics.jsonl line {number} is not" in said
    config = read_run_config(run)
    assert not is_finished(run, config) and not has_records(run, config) and read_progress(run).step == 0


def test_records_out_of_order_are_drawn(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert attempt(["report", str(run), "--out", str(tmp_path / "page.html")]).code == 0


@pytest.mark.parametrize("line", ["7", "[]", '{"step": "4", "seconds": 1}', '{"step": 4, "seconds": []}', "NaN", DEEP])
def test_odd_timings_are_left_out(run, line):
    with (run / "timing.jsonl").open("a") as file:
        file.write(f'{line}\n{{"step": 5, "seconds": 1e9, "steps_per_second": "many"}}\n')
    assert 0 <= result_row("name", "hash", run, read_run_config(run))["seconds"] < 1e6


@pytest.mark.parametrize(
    "content",
    [
        "7",
        '{"starts": 7}',
        '{"starts": {"a": 1}}',
        '{"starts": [7, null, []]}',
        '{"starts": [{"runtime": []}]}',
        '{"starts": [{"runtime": "cpu"}]}',
        '{"starts": [{"headcode": [], "threads": 1, "device": {}}]}',
        '{"starts": [' + DEEP + "]}",
    ],
)
def test_an_odd_environment_counts_as_none(run, content, tmp_path):
    (run / "environment.json").write_text(content)
    assert attempt(["resume", str(run)]).code == 0
    (run / "environment.json").write_text(content)
    assert attempt(["report", str(run), "--out", str(tmp_path / "page.html")]).code == 0


@pytest.mark.parametrize(
    ("runtime", "threads", "words"),
    [
        ({"device": 7}, 1, "device must be text, got 7"),
        ({"compile": "yes"}, 1, "compile must be True or False"),
        ({"more": 1}, 1, "no field 'more'"),
        ({}, "many", "threads must be a whole number"),
        ({}, 10**6, "threads must be at most 1024, got 1000000"),
        ({}, -1, "threads must be 1 or more, got -1"),
    ],
)
def test_a_runtime_that_cannot_be(run, runtime, threads, words):
    (run / "environment.json").write_text(json.dumps({"starts": [{"runtime": runtime, "threads": threads}]}))
    said = refusal("resume", run)
    assert "environment.json has no valid runtime" in said and words in said


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--num-layers", 10**6, "num_layers must be at most 4,096, got 1,000,000"),
        ("--dim", 10**8, "at most 1,000,000,000,000 parameters"),
        ("--mlp-dim", 2**31 - 1, "at most 1,000,000,000,000 parameters"),
        ("--dim", 10**12, "dim must be at most 2147483647"),
        ("--num-points", 10**9, "num_points must be at most 1,048,576"),
        ("--batch-size", 10**12, "268,435,456 tokens are computed at once"),
        ("--eval-batch-size", 10**12, "268,435,456 tokens are computed at once"),
    ],
)
def test_absurd_sizes(tmp_path, flag, value, words):
    sizes = ["--mlp-dim", "100000"] if flag == "--dim" else ["--dim", "100000"] if flag == "--mlp-dim" else []
    assert words in refusal("train", "logic", *sizes, flag, value, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_larger_than_the_memory(tmp_path, run):
    flags = ["--dim", 10**6, "--mlp-dim", 2 * 10**5, "--num-layers", 1]
    assert "GiB of memory: make the model smaller" in refusal("train", "logic", *flags, "--out", tmp_path / "new")
    values = json.loads((run / "config.json").read_text())
    values["model"] |= {"dim": 10**6, "mlp_dim": 2 * 10**5}
    (run / "config.json").write_text(json.dumps(values))
    for command in (["resume", run], ["codes", run, "--checkpoint", "untrained", "--size", 8]):
        assert "GiB of memory: make the model smaller" in refusal(*command)


def test_large_models_stay_allowed():
    gpt3 = {"dim": 12288, "num_layers": 96, "num_heads": 96, "qk_dim": 12288, "v_dim": 12288, "mlp_dim": 49152}
    config = ModelConfig(vocab_size=50257, max_length=2048, position="rotary", causal=True, **gpt3)
    assert config.num_parameters == pytest.approx(174.6e9, rel=1e-3)
    assert preset("lm-paper").model.num_parameters == 35_299_328


@pytest.mark.parametrize("position", ["relative", "rotary", "learned", "relative_learned", "none"])
@pytest.mark.parametrize("feedforward", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    "more",
    [
        {"input_dim": 5, "output_dim": 3},
        {"vocab_size": 11, "share_layers": True, "qk_norm": True},
        {"input_dim": 5, "output_dim": 3, "auxiliary_dims": (7, 2), "value_net": "swiglu"},
    ],
)
def test_parameters_are_counted_exactly(position, feedforward, more):
    sizes = {"dim": 6, "num_layers": 3, "num_heads": 2, "qk_dim": 8, "v_dim": 10, "mlp_dim": 17, "max_length": 13}
    config = ModelConfig(position=position, feedforward=feedforward, **sizes, **more)
    assert config.num_parameters == sum(parameter.numel() for parameter in Transformer(config).parameters())


def test_a_hostile_configuration_of_a_run(run):
    values = json.loads((run / "config.json").read_text())
    for section, name, value, words in (
        ("model", "num_layers", 10**6, "num_layers must be at most"),
        ("model", "num_layers", [], "num_layers must be a whole number"),
        ("task", "name", [], "must have a name out of"),
        ("task", "num_terms", 10**30, "do not exist"),
        ("model", "method", "x" * 10**6, "method must be one of"),
    ):
        changed = {**values, section: {**values[section], name: value}}
        (run / "config.json").write_text(json.dumps(changed))
        for command in (["eval", run], ["report", run], ["resume", run]):
            assert words in refusal(*command)


def test_many_compositions_are_not_redrawn_for_minutes():
    with pytest.raises(ValueError, match=r"\(33 draws tried\)"):
        FuzzyLogic(num_variables=10, num_terms=2, held_out=0.9985)
    with pytest.raises(ValueError, match="too many compositions"):
        FuzzyLogic(num_variables=16, num_terms=2**15)


def test_the_arithmetic_of_a_billion_tokens_is_counted_at_once(tmp_path):
    for more in ({"method": "hyla"}, {"method": "linear", "recurrent": True}):
        config = ModelConfig(vocab_size=7, max_length=16, position="none", causal=True, **more)
        save_model(Transformer(config), tmp_path)
        assert attempt(["info", str(tmp_path), "--length", "1000000000"], seconds=10).code == 0
        assert flops_per_token(config, 5) == forward_flops(config, 5) / 5
    pairs = sum(range(1, 12))
    config = ModelConfig(vocab_size=7, max_length=16, position="none", causal=True, method="softmax", num_layers=1)
    more = forward_flops(config, 11) - forward_flops(config.replace(causal=False), 11)
    assert more == 2 * (pairs - 11 * 11) * (config.qk_dim + config.v_dim)


FILES = ("config.json", "metrics.jsonl", "environment.json", "checkpoints/step-4/state.json")
COMMANDS = ("report", "eval", "resume", "info")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "gigabyte", "deep", "folder"])
def test_files_that_are_none(run, file, kind, tmp_path):
    path = run / file
    path.unlink()
    if kind == "deep":
        path.write_text(DEEP)
    else:
        NO_FILES[f"a {kind}"](path)
    for command in COMMANDS:
        more = ["--out", str(tmp_path / "page.html")] if command == "report" else []
        end = attempt([command, str(run), *more], seconds=10)
        assert end.error is None and end.code in (0, 2), (command, end)


def test_deep_words_on_the_command_line(tmp_path):
    deep = "[" * 50_000 + "]" * 50_000  # the longest cell of a table has 131,072 characters
    (tmp_path / "results.csv").write_text(f"name,seed\na,{deep}\nb,1\nc,{'9' * 400}\n")
    assert attempt(["results", str(tmp_path), "--group-by", "name", "--columns", "seed", "--json"]).code == 0
    assert attempt(["results", str(tmp_path), "--where", f"seed={DEEP}"]).code == 0
    assert "seed" in refusal("sweep", "logic", "--set", f"seed={DEEP}", "--out", tmp_path / "sweep")
    assert "--aligned takes JSON" in refusal("train", "sraven", "--aligned", DEEP, "--out", tmp_path / "new")


BOMB = """
import resource, sys
from headcode.interop import load_reference
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20, resource.RLIM_INFINITY))
try:
    load_reference(sys.argv[1])
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the limit of memory is set from Linux's own count")
def test_an_archive_that_expands_is_refused_before_it_does(tmp_path):
    path = tmp_path / "params.npz"
    np.savez_compressed(path, x=np.zeros(320 * 2**20, dtype=np.uint8))
    assert path.stat().st_size < 2**19
    done = subprocess.run([sys.executable, "-c", BOMB, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{path} is not an .npz file of arrays" in done.stdout and "expand to 335,544,448" in done.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": 10**30},
        {"best": []},
        {"best": {"step": []}},
        {"files": {"model.safetensors": 7}},
        {"metrics": 7},
        {"metrics": [7]},
        {"losses": ["high"]},
        {"gradient_norms": None},
        {"random": []},
        {"random": {"cpu": 7}},
    ],
)
def test_a_state_with_right_hashes_and_wrong_content(run, changes):
    state = run / "checkpoints" / "step-4" / "state.json"
    change(state, **changes)
    seal(run, state)
    for command in ("eval", "resume"):
        end = attempt([command, str(run)])
        assert end.error is None and end.code == 0, (command, end)
        assert "state.json does not have the content" in end.said  # passed over, and then set aside


def test_a_random_state_that_is_none(run):
    state = run / "checkpoints" / "step-4" / "state.json"
    change(state, random={"cpu": "AAAA"})
    seal(run, state)
    assert "random state of the checkpoint is not one of torch's" in refusal("resume", run)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_weights_of_another_model(run, file, tmp_path):
    other = tmp_path / "other"
    wider = {**SMALL, "dim": 15}
    Trainer(override(preset("logic-small"), **wider), other, runtime=Runtime(device="cpu", threads=1)).run()
    target = run / "checkpoints" / "step-4" / file
    shutil.copyfile(other / "checkpoints" / "step-4" / file, target)
    seal(run, target)
    said = refusal("resume", run)
    assert "not those of the run's model" in said or "does not belong to this model" in said
    if file == "model.safetensors":
        assert "does not belong to its config.json" in refusal("eval", run)


def test_tokens_beyond_any_vocabulary(tmp_path):
    pytest.importorskip("tokenizers")
    added = {"id": 2**32 - 1, "content": "x", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout = {"version": "1.0", "added_tokens": [added | flags], "model": {"type": "BPE", "vocab": {"x": 2**32 - 1}}}
    layout["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    with pytest.raises(ValueError, match="numbered up to 4,294,967,295"):
        read_tokenizer(tmp_path)


def test_environments_of_runs_are_lists_of_objects(run):
    (run / "environment.json").write_text('{"starts": [{"runtime": {}}, 7, {"runtime": 7}, {}]}')
    assert read_environments(run) == [{"runtime": {}}, {}]
