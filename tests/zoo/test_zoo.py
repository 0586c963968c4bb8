"""The zoo: models that load by name, cards that tell the truth, and a size that a package can carry."""

import json
import re
import shutil

import pytest
import torch

import headcode
from headcode import zoo
from headcode.cli import main
from headcode.experiments.records import find_records, unpack
from headcode.presets import override, preset
from headcode.sweep.plan import config_hash
from headcode.train import Trainer
from headcode.train.checkpoint import ZOO, find_run
from headcode.train.evaluate import evaluate_model
from headcode.train.folder import read_metrics, read_run_config
from headcode.zoo.add import add_model
from headcode.zoo.add import main as add_main
from tests.support import ROOT

SIZES = {"dim": 8, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8, "num_points": 5}
SHORT = {"steps": 3, "batch_size": 4, "eval_size": 16, "eval_every": 0, "checkpoint_every": 0, "log_every": 1}


def test_the_zoo_is_small_and_has_what_it_promises():
    names = zoo.names()
    assert {"logic-softmax", "logic-linear", "logic-hyla"} <= set(names)
    assert any(name.startswith("sraven-") for name in names)
    files = [path for path in ZOO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors"}


@pytest.mark.parametrize("name", zoo.names())
def test_a_model_scores_what_its_records_and_card_say(name):
    config, card = read_run_config(zoo.folder(name)), zoo.card(name)
    model = headcode.load(f"zoo/{name}")
    assert not model.training and model.config == config.model
    assert (card["task"], card["method"]) == (config.task.name, config.model.method)
    assert (card["steps"], card["seed"]) == (config.steps, config.seed)
    assert card["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert set(card["scores"]) == set(config.task.splits)
    last = {r["split"]: r for r in read_metrics(zoo.folder(name)) if r["kind"] == "eval" and r["step"] == config.steps}
    size = config.eval_size
    found = evaluate_model(
        model, config, ["compositional"], size=size, batch_size=config.eval_batch_size, device=torch.device("cpu")
    )["compositional"]
    metric = card["metric"]
    assert found[metric] == pytest.approx(last["compositional"][metric], abs=2e-4)
    # The card's score is over more instances of the same stream: it differs by chance alone.
    assert card["scores"]["compositional"][metric] == pytest.approx(found[metric], abs=0.06)
    if card["task"] == "sraven":
        assert card["scores"]["compositional"][metric] <= card["ceiling"]["compositional"] + 0.02


RECORDS = ROOT / "docs" / "results" / "records"


@pytest.mark.parametrize("method", ["softmax", "linear", "hyla"])
def test_the_models_on_fuzzy_logic_are_the_runs_of_the_results_page(method, tmp_path):
    """Same configuration, same metrics to the last byte: the card, the page and the model are one run."""
    folder = zoo.folder(f"logic-{method}")
    config = read_run_config(folder)
    (line,) = find_records(RECORDS, [config_hash(config)]).values()
    assert unpack(line, tmp_path, config)
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "metrics.jsonl").read_bytes()
    final = {r["split"]: r for r in read_metrics(folder) if r["kind"] == "eval"}["compositional"]
    page = (RECORDS.parent / "learning.md").read_text(encoding="utf-8")
    table = page.split("At rate 3e-3,")[1].split("At rate 1e-3")[0]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| `{method}` |"))
    seed_0 = row.split("|")[-2].split(",")[0].strip()
    assert seed_0 == f"{final['r2']:.3f}"


def test_commands_take_a_model_of_the_zoo(capsys):
    main(["eval", "zoo/logic-hyla", "--split", "novel", "--size", "64", "--json"])
    assert json.loads(capsys.readouterr().out)["method"] == "hyla"


def test_an_unknown_model_is_one_sentence(capsys):
    with pytest.raises(ValueError, match=r"The zoo has no model 'dodo'; it has: .*logic-hyla"):
        headcode.load("zoo/dodo")
    with pytest.raises(SystemExit) as stop:
        main(["eval", "zoo/dodo"])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("headcode: The zoo has no model 'dodo'")


@pytest.mark.parametrize("path", ["zoo/../../etc", "zoo", "other/logic-hyla", "/zoo/logic-hyla"])
def test_only_two_words_mean_the_zoo(path):
    assert find_run(path).as_posix() == path


def test_a_run_of_the_same_path_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo.folder("logic-linear"), tmp_path / "zoo" / "logic-hyla")
    assert headcode.load("zoo/logic-hyla").config.method == "linear"


def test_a_copy_of_a_model_is_not_resumed(tmp_path, capsys):
    shutil.copytree(zoo.folder("logic-linear"), tmp_path / "copy")
    with pytest.raises(SystemExit) as end:
        main(["resume", str(tmp_path / "copy")])
    assert end.value.code == 2
    assert "has weights alone, as the zoo's models have" in capsys.readouterr().err


def test_a_damaged_model_is_refused(tmp_path):
    shutil.copytree(zoo.folder("logic-linear"), tmp_path / "copy")
    (weights,) = (tmp_path / "copy").rglob("model.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="does not have the content that was written"):
        headcode.load(tmp_path / "copy")


def test_adding_a_run(tmp_path):
    run = tmp_path / "run"
    Trainer(override(preset("logic"), **SIZES, **SHORT), run).run()
    folder = add_model(run, "small", "A test.", zoo=tmp_path / "zoo", size=32)
    card = json.loads((folder / "card.json").read_text())
    assert card["steps"] == 3 and card["instances"] == 12 and set(card["scores"]["novel"]) >= {"r2", "loss"}
    trained, kept = headcode.load(run), headcode.load(folder)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), kept.parameters(), strict=True))
    assert not list(folder.rglob("optimizer*"))


def test_aligned_training_puzzles_have_no_ceiling(tmp_path):
    small = {name: size for name, size in SIZES.items() if name != "num_points"}
    Trainer(override(preset("sraven"), **small, **SHORT, num_features=2, aligned=0.5), tmp_path / "run").run()
    folder = add_model(tmp_path / "run", "small", "A test.", zoo=tmp_path / "zoo", size=32)
    card = json.loads((folder / "card.json").read_text())
    assert set(card["scores"]) == {"train", "iid", "compositional"} and set(card["ceiling"]) == {"iid", "compositional"}
    assert 0.9 < card["ceiling"]["compositional"] <= 1


PATHS = re.compile(rb"/(?:home|root|tmp|var|usr|opt|work|mnt|Users)/|[A-Z]:\\\\")


def test_the_zoo_tells_nothing_of_the_machine_that_trained_it():
    for path in ZOO.rglob("*"):
        if path.suffix in (".json", ".jsonl"):
            content = path.read_bytes()
            assert not PATHS.search(content), path
            assert b'"command"' not in content and b'"platform"' not in content, path


def test_adding_a_run_leaves_the_machine_behind(tmp_path):
    run = tmp_path / "run"
    Trainer(override(preset("logic"), **SIZES, **SHORT), run).run()
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert starts[0]["command"] and starts[0]["platform"]  # what must not be kept
    folder = add_model(run, "small", "A test.", zoo=tmp_path / "zoo", size=32)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    step = "checkpoints/step-3"
    assert files == [
        "card.json",
        *(f"{step}/{name}" for name in ("config.json", "model.safetensors", "state.json")),
        "config.json",
        "metrics.jsonl",
    ]
    for name in files:
        content = (folder / name).read_bytes()
        assert str(tmp_path).encode() not in content and not PATHS.search(content), name
        assert starts[0]["platform"].encode() not in content, name
    card = json.loads((folder / "card.json").read_text())
    assert set(card["environment"]) == {"headcode", "torch", "python"}


def test_a_model_stays_when_another_of_its_name_cannot_be_added(tmp_path):
    config = override(preset("logic"), **SIZES, **SHORT)
    Trainer(config, tmp_path / "run").run()
    folder = add_model(tmp_path / "run", "small", "A test.", zoo=tmp_path / "zoo", size=32)
    before = (folder / "card.json").read_bytes()
    (tmp_path / "run/environment.json").unlink()
    with pytest.raises(ValueError, match=r"environment\.json tells of no start"):
        add_model(tmp_path / "run", "small", "Another.", zoo=tmp_path / "zoo", size=32)
    assert (folder / "card.json").read_bytes() == before


def test_a_model_stays_when_the_writing_of_another_is_cut_short(tmp_path, monkeypatch):
    Trainer(override(preset("logic"), **SIZES, **SHORT), tmp_path / "run").run()
    folder = add_model(tmp_path / "run", "small", "A test.", zoo=tmp_path / "zoo", size=32)
    with monkeypatch.context() as patch:
        patch.setattr("headcode.zoo.add.write_checkpoint", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            add_model(tmp_path / "run", "small", "Another.", zoo=tmp_path / "zoo", size=32)
    assert json.loads((folder / "card.json").read_text())["about"] == "A test." and headcode.load(folder)
    assert (tmp_path / "zoo/.small").is_dir()
    monkeypatch.setattr("headcode.zoo.ZOO", tmp_path / "zoo")
    monkeypatch.setattr("headcode.train.checkpoint.ZOO", tmp_path / "zoo")
    assert zoo.names() == ["small"]
    with pytest.raises(ValueError, match=r"The zoo has no model '\.small'; did you mean 'small'\? It has: small\."):
        find_run("zoo/.small")
    add_model(tmp_path / "run", "small", "Another.", zoo=tmp_path / "zoo", size=32)
    assert json.loads((folder / "card.json").read_text())["about"] == "Another."
    assert [path.name for path in (tmp_path / "zoo").iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "takes RUN NAME ABOUT, got 0 words"),
        (["nowhere", "../dodo", "A bird."], "A model's name is small letters, digits and dashes"),
        (["nowhere", "dodo", "A bird."], "nowhere"),
    ],
)
def test_mistakes_in_adding_are_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        add_main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1


def test_an_unfinished_run_is_not_added(tmp_path):
    config = override(preset("logic"), **SIZES, **SHORT | {"steps": 5, "checkpoint_every": 3})
    Trainer(config, tmp_path / "run").run()
    shutil.rmtree(tmp_path / "run/checkpoints/step-5")
    with pytest.raises(ValueError, match="only come to step 3 of 5"):
        add_model(tmp_path / "run", "small", "A test.", zoo=tmp_path / "zoo", size=32)
