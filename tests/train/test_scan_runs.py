"""SCAN through the commands: train, eval, decode, codes, sweep, report, explore, on a run of seconds."""

import json

import numpy as np
import pytest
import torch

from headcode.analysis import capture, decode, open_run
from headcode.analysis.ablate import ablate
from headcode.cli import main
from headcode.nn import EncoderDecoder, forward_flops, greedy_decode
from headcode.presets import override, preset
from headcode.run import RunConfig
from headcode.tasks.scan import END, START
from headcode.train import Trainer, load
from headcode.train.evaluate import evaluate_model

SIZES = {"dim": 16, "num_heads": 2, "qk_dim": 8, "v_dim": 8, "mlp_dim": 16, "num_layers": 1, "decoder_layers": 1}
EVERY = {"steps": 6, "batch_size": 5, "eval_every": 3, "eval_size": 23, "eval_batch_size": 7, "checkpoint_every": 3}
CONFIG = override(preset("scan"), scan_split="jump", method="hyla", **SIZES, **EVERY)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scan") / "run"
    Trainer(CONFIG, folder).run()
    return folder


def printed(capsys, *words):
    capsys.readouterr()
    main([str(word) for word in words])
    return capsys.readouterr().out


def test_the_run_is_its_configuration(run, tmp_path):
    assert RunConfig.load(run / "config.json") == CONFIG
    again = Trainer(CONFIG, tmp_path / "again").run()
    model = load(run)
    assert isinstance(model, EncoderDecoder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model.parameters(), strict=True))


def test_eval_says_what_greedy_decoding_does(run, capsys):
    told = json.loads(printed(capsys, "eval", run, "--split", "compositional", "--size", "23", "--json"))
    task = CONFIG.task
    batch = task.instances("compositional", range(23))
    written = greedy_decode(load(run), batch.x[:, :9], start_token=START, end_token=END)
    wanted = batch.y.clamp(min=0)[:, : written.shape[1]]
    right = (written == wanted).all(1) & (batch.y.clamp(min=0)[:, written.shape[1] :] == 0).all(1)
    assert told["exact_match"] == float(right.float().mean())


def test_exact_match_is_that_of_greedy_decoding_for_a_model_that_knows_some_commands():
    """A tenth of these training lines are the command jump, which the model knows first."""
    config = override(CONFIG, steps=120, batch_size=64, dim=32, eval_size=0, checkpoint_every=0)
    model = Trainer(config).run().model
    task = config.task
    found = evaluate_model(model, config, ["train"], size=512, batch_size=128, device=torch.device("cpu"))["train"]
    batch = task.instances("train", range(512))
    written = greedy_decode(model, batch.x[:, :9], start_token=START, end_token=END)
    padded = torch.nn.functional.pad(written, (0, 49 - written.shape[1]))
    right = (padded == batch.y.clamp(min=0)).all(1)
    assert right.tolist() == task.judge(model(batch.x), batch)["correct"].tolist()
    assert found["exact_match"] == right.double().mean() and 40 < right.sum() < 512


def test_codes_of_cross_attention_are_captured_and_decoded(run, tmp_path):
    opened = open_run(run)
    codes = capture(opened, "iid", tmp_path / "codes.npz", size=11, keys=None, residual=True)
    assert codes["codes_layer_2"].shape == (11, 9, 2) and codes["residual_layer_2"].shape == (11, 1, 16)
    assert np.asarray(codes["pairs"]).tolist() == [[9, key] for key in range(9)]
    with pytest.raises(ValueError, match="in layers 2 and later"):
        capture(opened, "iid", tmp_path / "more.npz", size=11, layers=[0], keys=None)
    result = decode(run, fit_size=128, test_size=64)
    rows = [row for row in result["rows"] if row["subset"] == "all"]
    assert {row["layer"] for row in rows} == {2} and result["card"]["keys"] == "all"
    assert {row["source"] for row in rows} == {"codes", "residual", "untrained", "shuffled", "position"}


def test_heads_of_every_layer_are_taken_out(run):
    rows = ablate(open_run(run), size=13)
    assert [(row["layer"], row["head"]) for row in rows[1:]] == [(layer, head) for layer in range(3) for head in (0, 1)]


def test_commands_work_as_on_the_other_tasks(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = [word for name, value in {**SIZES, **EVERY}.items() for word in (f"--{name.replace('_', '-')}", value)]
    printed(capsys, "train", "scan", "--scan-split", "turn_left", "--method", "softmax", *sizes, "--out", "other")
    assert json.loads((tmp_path / "other" / "config.json").read_text())["task"]["scan_split"] == "turn_left"
    assert "exact_match" in printed(capsys, "eval", "other", "--split", "iid", "--size", "8")
    assert "jump" in printed(capsys, "puzzle", "scan", "--scan-split", "jump", "--split", "compositional", "--answer")
    values = ("method=softmax,linear", *(f"{name}={value}" for name, value in {**SIZES, **EVERY, "steps": 2}.items()))
    printed(capsys, "sweep", "scan", *(word for value in values for word in ("--set", value)), "--out", "many")
    table = (tmp_path / "many" / "results.csv").read_text().splitlines()
    assert len(table) == 3 and "compositional/exact_match" in table[0]
    printed(capsys, "report", "other", run, "--out", "report.html")
    assert "exact_match" in (tmp_path / "report.html").read_text(encoding="utf-8")
    printed(capsys, "decode", run, "--size", "64", "--out", "found")
    assert json.loads((tmp_path / "found" / "decode.json").read_text())["card"]["task"] == "scan"
    printed(capsys, "codes", run, "--size", "64", "--out", "codes.npz", "--map", "pca", "--map-size", "50")
    assert list(tmp_path.glob("figures/*manner.svg"))
    assert "encoder_decoder" in printed(capsys, "info", run)


def test_the_explorer_shows_the_cross_attention(run):
    pytest.importorskip("dash", reason="the explorer needs headcode[explorer]")
    from headcode.explorer.app import create_app

    _, explorer = create_app([str(run)])
    left = str(explorer.left("?model=run&shown=1&donor=n-1"))
    right = str(explorer.right("?model=run&shown=1&donor=n-1", 0))
    assert "I_" in left and "held out in the split jump" in left
    assert "patched" in right and "Nearest codes" in right
    for layer, query, key in ((0, 3, 1), (1, 12, 10), (2, 9, 0), (0, 12, 1)):
        explorer.right(f"?model=run&layer={layer}&query={query}&key={key}&donor=n-2&swap=key&deep=1", 0)


def test_the_arithmetic_of_an_encoder_decoder_by_hand():
    """dim 4, heads 2, qk 2, v 6, mlp 8, hyla; one layer each; source 3, target 2, 11 tokens."""
    sizes = {"dim": 4, "num_heads": 2, "qk_dim": 2, "v_dim": 6, "mlp_dim": 8, "num_layers": 1, "decoder_layers": 1}
    sizes |= {"vocab_size": 11, "output_dim": 11, "max_length": 5, "source_length": 3, "method": "hyla"}
    config = type(CONFIG.model)(**sizes)
    token = 4 * (2 + 2 + 6 + 6) + 2 * 4 * 8  # q, k, v and output projections, feed-forward
    pair = 2 + 2 * 6  # the score, and two generated layers
    encoder, decoder = 3 * token + 9 * pair, 2 * token + 3 * pair + 2 * 4 * 11
    crossing = 3 * 4 * (2 + 6) + 2 * 4 * (2 + 6) + 6 * pair
    assert forward_flops(config, 5) == 2 * (encoder + decoder + crossing)
