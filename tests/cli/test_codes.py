"""headcode codes, decode and lens: what they write and print, and one sentence for every mistake."""

import json
import os

import numpy as np
import pytest

from headcode.analysis.files import open_arrays
from headcode.cli import main
from headcode.presets import override, preset
from headcode.tasks import Task
from headcode.train import Trainer

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 6, "mlp_dim": 8, "num_layers": 2, "backend": "reference"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    short = {"steps": 3, "batch_size": 8, "eval_size": 16, "eval_every": 0, "checkpoint_every": 0}
    path = tmp_path_factory.mktemp("runs") / "first"
    Trainer(override(preset("sraven-small"), **SIZES, **short), path).run()
    return path


def refused(capsys, *arguments):
    """The one sentence with which a command ends; exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    words = capsys.readouterr().err
    assert stop.value.code == 2 and words.startswith("headcode: ") and words.count("\n") == 1
    return words


def test_codes(run, tmp_path, capsys):
    out = tmp_path / "codes.npz"
    main(["codes", str(run), "--split", "iid", "--size", "30", "--keys", "all", "--layers", "-1", "--out", str(out)])
    assert "30 instances of iid, 36 (query, key) pairs, 3 heads" in capsys.readouterr().out
    codes = open_arrays(out)
    assert codes["codes_layer_1"].shape == (30, 36, 3) and codes["queries"].tolist() == [16, 17]
    main(["codes", str(run), "--size", "20", "--out", str(tmp_path / "c.parquet"), "--map", "pca"])
    words = capsys.readouterr().out
    assert "no map of layer 0" in words and (tmp_path / "figures" / "c-pca-layer1-rule.svg").is_file()
    assert open_arrays(tmp_path / "c-pca-layer1.npz").card["map_seed"] == 0
    main(["codes", str(run), "--size", "20", "--queries", "3", "--out", str(tmp_path / "q.npz"), "--map", "pca"])
    drawn = {path.name for path in (tmp_path / "figures").glob("q-pca-layer1-*.png")}
    assert drawn == {"q-pca-layer1-rule.png", "q-pca-layer1-correct.png"}, "a cell that is shown has no target"


def test_decode(run, tmp_path, capsys):
    options = [str(run), "--size", "60", "--layers", "1", "--out", str(tmp_path)]
    main(["decode", *options, "--controls", "shuffled", "position"])
    words = capsys.readouterr().out
    assert "macro_f1" in words and "shuffled" in words
    assert {p.name for p in tmp_path.iterdir()} == {"decode.json", "decode.csv", "figures"}
    main(["decode", *options, "--ablate", "--likeness", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["ablate"]["rows"]) == 4 and found["likeness"]["rows"][0]["layer"] == 1
    main(["decode", str(run), "--size", "60", "--out", str(tmp_path), "--likeness", "--json"])
    rows = json.loads(capsys.readouterr().out)["likeness"]["rows"]
    assert rows[0] == {"layer": 0, "diagonal_share": None, "classes_compared": 0} and rows[1]["diagonal_share"] >= 0
    main(["decode", *options, "--training"])
    assert "codes along training" in capsys.readouterr().out
    assert (tmp_path / "training.npz").is_file() and (tmp_path / "figures" / "training.png").is_file()


def test_patch(run, tmp_path, capsys, monkeypatch):
    before = Task.judge
    monkeypatch.setattr(Task, "judge", lambda t, p, b: {**before(t, p, b), "correct": np.ones(len(b.x), bool)})
    main(["decode", str(run), "--patch", "--split", "iid", "--size", "200", "--out", str(tmp_path)])
    assert "follows" in capsys.readouterr().out
    rows = json.loads((tmp_path / "patch.json").read_text())["rows"]
    assert {"patched", "shuffled", "none"} == {row["control"] for row in rows} and rows[0]["keys"] == "all"
    assert (tmp_path / "figures" / "patch.svg").is_file()


def test_mistakes_of_codes_and_decode(run, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(preset("sraven-small").to_json())
    for command in ("codes", "decode"):
        assert "no checkpoint yet" in refused(capsys, command, empty)
        assert "no split 'novel'" in refused(capsys, command, run, "--split", "novel")
        assert "layers 0 to 1" in refused(capsys, command, run, "--layers", "7")
        assert "no such folder" in refused(capsys, command, tmp_path / "none")
        assert "is for fuzzy logic" in refused(capsys, command, run, "--inputs", "fixed_query")
        assert "self, all or positions" in refused(capsys, command, run, "--keys", "some")
        assert "no checkpoint 'step-9'" in refused(capsys, command, run, "--checkpoint", "step-9")
    for kind in ("--patch", "--ablate"):
        assert "is for fuzzy logic" in refused(capsys, "decode", run, kind, "--inputs", "fixed_query")
    assert "all or self, got '3 5'" in refused(capsys, "decode", run, "--patch", "--keys", "3", "5")
    assert "layers 0 to 1" in refused(capsys, "decode", run, "--training", "--layers", "7")
    assert "follows one layer, got 2" in refused(capsys, "decode", run, "--training", "--layers", "0", "1")
    assert "18 tokens" in refused(capsys, "codes", run, "--queries", "18")
    assert "ends in none of" in refused(capsys, "codes", run, "--out", tmp_path / "codes.csv")
    assert "size" in refused(capsys, "codes", run, "--size", "0")
    assert "no 'luck'" in refused(capsys, "decode", run, "--controls", "luck")


def test_lens(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    from tests.support.lens import TEXT, save_word_model

    monkeypatch.chdir(tmp_path)
    folder = save_word_model(tmp_path / "model", "llama", num_key_value_heads=2)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    few = ["--built", "11", "--patched", "2", "--max-texts", "9"]
    pairs = ["--networks", "3", "1", "-1", "0", "--pairs", "2"]
    main(["lens", str(folder), "--text", str(text), "--data", "data", "--out", "p.html", *few, *pairs])
    printed = capsys.readouterr().out
    assert "6 heads, largest relative error of the reading" in printed and printed.endswith("wrote p.html\n")
    assert "Layer 1. " in printed and sorted(path.name for path in tmp_path.iterdir()) == [
        "data", "model", "p.html", "text.txt",
    ]  # fmt: skip
    page = (tmp_path / "p.html").read_text()
    assert "9 sentences (text.txt) and 88 built ones" in page and "verb and its subject" in page
    found = json.loads((tmp_path / "data" / "lens.json").read_text())
    assert [row["reproduces"] for row in found["rows"]] == [True, True]
    length = len(found["card"]["tokens"])
    assert open_arrays(tmp_path / "data" / "codes.npz")["codes_layer_1"].shape == (length, length, 6)
    networks = open_arrays(tmp_path / "data" / "networks.npz")
    assert networks["layer_0"].shape == (2, 24, 24) and networks["pairs"].tolist() == [[3, 1], [length - 1, 0]]
    study = json.loads((tmp_path / "data" / "study.json").read_text())
    assert study["card"]["passages"] == 9 and [layer["reproduces"] for layer in study["layers"]] == [True, True]

    assert "there is no layer 5" in refused(capsys, "lens", folder, "--text", text, "--layers", "5")
    assert "does not exist" in refused(capsys, "lens", folder, "--text", tmp_path / "none.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt is not a regular file" in refused(capsys, "lens", folder, "--text", tmp_path / "pipe.txt")
    assert "pairs must be 1 or more" in refused(capsys, "lens", folder, "--text", text, "--pairs", "0")
    assert "--data, which takes a folder" in refused(capsys, "lens", folder, "--text", text, "--networks", "1", "2")
    assert "ends in .html, got 'o'" in refused(capsys, "lens", folder, "--text", text, "--out", tmp_path / "o")
    assert "Give --text FILE, or --images FILE" in refused(capsys, "lens", folder)
    assert "takes an .npz file" in refused(capsys, "lens", folder, "--images", tmp_path / "none.npz")
    np.savez(tmp_path / "i.npz", images=np.zeros((2, 3, 4, 4)))
    assert "sees texts, and images were given" in refused(capsys, "lens", folder, "--images", tmp_path / "i.npz")
    with text.open("ab") as file:
        file.truncate(2**30)  # takes no room on disk; only the beginning is read
    main(["lens", str(folder), "--text", str(text), "--built", "0", "--patched", "0", "--layers", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["card"]["passages"] >= 9
    text.write_text(" \n")
    assert "The text is empty; the lens reads sentences" in refused(capsys, "lens", folder, "--text", text)
    text.write_text("cat")
    main(["lens", str(folder), "--text", str(text), "--built", "0", "--patched", "0"])
    printed = capsys.readouterr().out
    assert "Not asked: relative position, because the text has fewer than two classes" in printed
    assert "No question could be asked of the codes." in (tmp_path / "lens.html").read_text()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickled weights" in refused(capsys, "lens", folder, "--text", text)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "cannot read the architecture 'mamba'" in refused(capsys, "lens", folder, "--text", text)
    (folder / "config.json").unlink()
    assert "it has no config.json" in refused(capsys, "lens", folder, "--text", text)
    os.mkfifo(folder / "config.json")
    assert "config.json is not a regular file" in refused(capsys, "lens", folder, "--text", text)


def test_lens_on_a_run(tmp_path, capsys):
    """A language model of headcode's by its run folder, and a run of another task refused."""
    pytest.importorskip("tokenizers")
    from tests.support.lens import TEXT

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(TEXT * 40)
    (tmp_path / "t.txt").write_text(TEXT)
    sizes = "--dim 12 --num-heads 3 --qk-dim 6 --v-dim 6 --mlp-dim 8 --num-layers 2 --context 64 --vocab-size 257"
    train = f"train lm --text {tmp_path}/text --tokenizer bytes {sizes} --steps 1 --eval-every 0"
    main([*train.split(), "--out", str(tmp_path / "run")])
    capsys.readouterr()
    few = ["--built", "11", "--patched", "2", "--out", str(tmp_path / "p.html")]
    main(["lens", str(tmp_path / "run"), "--text", str(tmp_path / "t.txt"), *few])
    assert "3 heads, largest relative error" in capsys.readouterr().out
    page = (tmp_path / "p.html").read_text()
    assert "kind of the key" in page and "verb and its subject" in page
    assert "too few sentences are equally long in this model" in page  # in bytes, words differ in length
    assert "headcode decode zoo/logic-hyla" in refused(capsys, "lens", "zoo/logic-hyla", "--text", tmp_path / "t.txt")
