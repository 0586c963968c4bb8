"""`headcode train lm` and `headcode generate`: from a file of text to text, and what they refuse."""

import json
import math

import pytest
import torch

from headcode.cli import main
from headcode.nn import generate
from headcode.presets import preset
from headcode.train import load, read_metrics, read_run_config
from tests.support.commands import fails

FLAGS = """--context 16 --num-layers 2 --dim 12 --num-heads 2 --qk-dim 8 --v-dim 6 --mlp-dim 11 --batch-size 5
--eval-size 6 --eval-batch-size 4 --backend reference --device cpu --threads 1"""
SIZES = FLAGS.split()
RUN = ["train", "lm", *SIZES, "--steps", "6", "--log-every", "3", "--eval-every", "3", "--checkpoint-every", "2"]
POEM = "The raven sat upon a stone — müde, and alone.\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "poem.txt"
    file.write_text("".join(f"{n}. {POEM}" for n in range(120)))
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("lm") / "run"
    main([*RUN, "--text", str(text), "--vocab-size", "290", "--method", "linear", "--out", str(out)])
    return out


def test_a_run_from_text_to_numbers(run, text, capsys):
    config = read_run_config(run)
    assert (config.task.name, config.task.vocab_size, config.model.vocab_size) == ("lm", 290, 290)
    assert (config.model.max_length, config.model.causal, config.model.position) == (16, True, "rotary")
    assert len(config.task.shards) == len(config.task.tokenizer_hash) == 64
    main(["eval", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)["splits"]["validation"]
    (recorded,) = [r for r in read_metrics(run) if r["kind"] == "eval" and r["step"] == 6]
    assert {name: recorded[name] for name in found} == found
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    main([*RUN, "--text", str(text), "--vocab-size", "290", "--method", "linear", "--out", str(run)])
    told = capsys.readouterr()
    assert "linear on lm, seed 0, 6 steps" in told.out and "bits_per_byte" in told.out
    assert "training a BPE" not in told.err  # found again
    assert "parameters, 480 tokens in 6 steps" in told.err and "FLOPs: at least" in told.err
    main(["resume", str(run)])
    assert "6 steps" in capsys.readouterr().out
    main(["info", str(run / "checkpoints" / "step-6")])
    assert "vocab_size=290" in capsys.readouterr().out


def test_nothing_held_out_is_nothing_to_evaluate_on(text, tmp_path, capsys):
    out = tmp_path / "run"
    main([*RUN, "--text", str(text), "--vocab-size", "290", "--validation", "0", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main(["eval", str(out)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("or name a split: --split train.")
    main(["eval", str(out), "--split", "train", "--json"])
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0


def test_generate_is_the_model_going_on(run, capsys):
    prompt = "The raven"
    main(["generate", str(run), "--prompt", prompt, "--temperature", "0", "--max-tokens", "12", "--json"])
    found = json.loads(capsys.readouterr().out)
    config = read_run_config(run)
    tokens = config.task.text.tokenizer.encode([prompt])[0].tolist()
    expected = list(generate(load(run), tokens, 12, temperature=0, cache=False, end_token=0))
    assert found["tokens"] == expected and found["recurrent"] is True
    assert found["text"] == config.task.text.tokenizer.decode(expected)
    main(["generate", str(run), "--prompt", prompt, "--temperature", "0", "--max-tokens", "12"])
    assert capsys.readouterr().out == prompt + found["text"] + "\n"
    for flags in (["--no-cache"], ["--recurrent", "False"], ["--recurrent", "True"]):
        main(["generate", str(run), "--prompt", prompt, "--temperature", "0", "--max-tokens", "12", "--json", *flags])
        assert json.loads(capsys.readouterr().out)["tokens"] == expected
    drawn = []
    for seed in ("1", "1", "2"):
        main(["generate", str(run), "--seed", seed, "--temperature", "1.5", "--top-p", "0.9", "--json"])
        drawn.append(json.loads(capsys.readouterr().out))
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0]["prompt"] == ""
    main(["generate", str(run), "--prompt", prompt, "--top-k", "1", "--max-tokens", "12", "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    assert all(d["ended"] == (len(d["tokens"]) < 200) for d in drawn)


def test_bytes_folders_and_epochs(tmp_path, text, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(25):
        (folder / f"{n}.md").write_text(f"{n} {POEM}" * 3)
        (folder / f"{n}.bin").write_bytes(b"\0\1")
    flags = ["--text", str(folder), "--files", "*.[mb]*", "--tokenizer", "bytes", "--epochs", "1.5"]
    main([*RUN, *flags, "--out", str(tmp_path / "run")])
    assert "25 files of" in (told := capsys.readouterr()).err and "not text" in told.err
    config = read_run_config(tmp_path / "run")
    assert (config.task.tokenizer, config.task.vocab_size) == ("bytes", 257)
    assert config.steps == round(1.5 * config.task.epoch_size / 5)


def test_a_band_with_learned_positions_decodes_without_a_state(text, tmp_path, capsys):
    """`linear` has a state for the past, but not with a bias for each pair."""
    flags = ["--method", "linear", "--position", "relative_learned", "--tokenizer", "bytes", "--steps", "1"]
    main([*RUN, "--text", str(text), *flags, "--out", str(tmp_path / "run")])
    capsys.readouterr()
    found = []
    for more in ([], ["--no-cache"]):
        flags = ["--prompt", "raven", "--temperature", "0", "--max-tokens", "8", "--json", *more]
        main(["generate", str(tmp_path / "run"), *flags])
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["recurrent"] is False and found[0]["tokens"]


def test_an_existing_tokenizer(run, text, tmp_path):
    flags = ["--text", str(text), "--tokenizer-file", str(run / "tokenizer.json"), "--steps", "2"]
    main([*RUN, *flags, "--out", str(tmp_path / "run")])
    config, before = read_run_config(tmp_path / "run"), read_run_config(run)
    assert config.task.tokenizer == "file" and config.task.tokenizer_hash == before.task.tokenizer_hash


def test_a_local_dataset(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(json.dumps({"body": f"{n} {POEM}"}) for n in range(90)))
    flags = ["--dataset", str(tmp_path / "data"), "--column", "body", "--tokenizer", "bytes", "--steps", "2"]
    main([*RUN, *flags, "--out", str(tmp_path / "run")])
    assert read_run_config(tmp_path / "run").task.text.index["source"]["column"] == "body"


def test_a_dry_run_reads_no_text(capsys):
    main(["train", "lm", "--preset", "lm-paper", "--dry-run"])
    report = json.loads(capsys.readouterr().out)
    cost = report["cost"]
    assert cost["parameters"] == 35_299_328 and abs(cost["tokens"] - 130e9) < 1e9
    # By hand: embedding read-out, four projections, GELU, and 512.5 keys per query with scores and two value layers.
    per_token = 32_000 * 512 + 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 512.5 * (512 + 2 * 512))
    assert cost["flops_per_step"] == pytest.approx(3 * 2 * per_token * 1024 * 256)
    assert report["config"]["task"]["shards"] == ""


def test_presets_for_text():
    paper, authors, small = (preset(name) for name in ("lm-paper", "wikitext-authors", "lm-small"))
    assert (authors.model.dim, authors.model.num_layers, authors.model.num_heads) == (128, 8, 16)
    assert (authors.model.qk_dim, authors.model.v_dim, authors.model.mlp_dim) == (128, 128, 256)
    assert (authors.model.position, authors.model.feedforward, authors.batch_size) == ("relative", "swiglu", 128)
    assert (authors.task.vocab_size, authors.task.context) == (6144, 256)
    assert (authors.optimization.warmup_steps, authors.optimization.weight_decay) == (1000, 0.1)
    assert paper.task.context == 1024 and small.model.position == "rotary"


class TestRefusals:
    def test_text(self, tmp_path, text, capsys):
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
        (tmp_path / "short.txt").write_text("too short")
        out = ["--out", str(tmp_path / "run")]
        for name, words in (("empty", "is empty"), ("binary", "is a binary file"), ("short", "text is too short")):
            found = fails_with(capsys, *RUN, "--text", tmp_path / f"{name}.txt", "--tokenizer", "bytes", *out)
            assert words in found
        assert "There is no file or folder" in fails_with(capsys, *RUN, "--text", tmp_path / "none", *out)
        both = fails_with(capsys, *RUN, "--text", text, "--dataset", "c4", *out)
        assert "Give --text or --dataset, not both" in both
        assert "must be above 0, got -1" in fails_with(capsys, *RUN, "--text", text, "--epochs", "-1", *out)
        assert "causal must be True" in fails_with(capsys, *RUN, "--text", text, "--no-causal", *out)
        assert "at least 257 tokens" in fails_with(capsys, *RUN, "--text", text, "--vocab-size", "100", *out)
        assert "needs --tokenizer-file" in fails_with(capsys, *RUN, "--text", text, "--tokenizer", "file", *out)
        assert not (tmp_path / "run").exists()

    def test_tokenizers_that_do_not_match(self, run, text, tmp_path, capsys):
        (tmp_path / "broken.json").write_text("{")
        flags = ["--text", text, "--tokenizer-file", tmp_path / "broken.json"]
        assert "is not a tokenizer in the format" in fails_with(capsys, *RUN, *flags)
        main([*RUN, "--text", str(text), "--tokenizer", "bytes", "--steps", "2", "--out", str(tmp_path / "bytes")])
        capsys.readouterr()
        other = tmp_path / "bytes" / "tokenizer.json"
        found = fails(capsys, "generate", run, "--prompt", "x", "--tokenizer", other)
        assert "is not the tokenizer that" in found and "(257 tokens, the model has 290)" in found
        assert "There is no tokenizer" in fails(capsys, "generate", run, "--tokenizer", tmp_path / "none.json")

    def test_prompts(self, text, tmp_path, capsys):
        band = ["--position", "relative", "--tokenizer", "bytes", "--steps", "2", "--out", str(tmp_path / "run")]
        main([*RUN, "--text", str(text), *band])
        capsys.readouterr()
        words = fails(capsys, "generate", tmp_path / "run", "--prompt", "x" * 16)
        assert "has 16 tokens" in words and "'relative'" in words and "at most 15 tokens" in words
        main(["generate", str(tmp_path / "run"), "--prompt", "x" * 13, "--json", "--max-tokens", "50"])
        assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 3  # until the context is full
        for flags, words in (
            (["--max-tokens", "0"], "max_tokens must be"),
            (["--temperature", "-1"], "temperature must be"),
            (["--top-p", "0"], "top_p must be"),
            (["--top-k", "0"], "top_k must be"),
            (["--recurrent", "True"], "recurrent=True is not possible"),
            (["--recurrent", "True", "--no-cache"], "leave one out"),
        ):
            assert words in fails(capsys, "generate", tmp_path / "run", "--prompt", "x", *flags)

    def test_a_prompt_that_is_not_text(self, run, capsys):
        """As Python hands over the bytes a, 0xff of a command line; the tokenizers would raise whatever they like."""
        words = fails(capsys, "generate", run, "--prompt", "a\udcff")
        assert "--prompt must be text in UTF-8, and its character 2 is not" in words

    def test_flags_that_have_nothing_to_act_on(self, text, tmp_path, capsys):
        out = ["--out", str(tmp_path / "run")]
        assert "is one file; leave it out" in fails_with(capsys, *RUN, "--text", text, "--files", "*.md", *out)
        assert "A dataset needs a name" in fails_with(capsys, *RUN, "--dataset", "", *out)
        too_few = fails_with(capsys, *RUN, "--text", text, "--tokenizer", "bytes", "--max-tokens", "5", *out)
        assert "its train part has 5 tokens" in too_few

    def test_a_dataset_that_cannot_be_reached(self, tmp_path, capsys, monkeypatch):
        import datasets

        def fail(*arguments, **options):
            raise ConnectionError("offline")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        monkeypatch.setattr("headcode.tasks.language.corpus._hub_is_there", lambda: True)
        found = fails_with(capsys, *RUN, "--dataset", "someone/something", "--out", tmp_path / "run")
        assert "'someone/something' could not be reached or read (offline)" in found
        assert not (tmp_path / "run").exists()

    def test_shards_that_are_gone(self, run, tmp_path, capsys, monkeypatch):
        memory = json.loads((run / "text.json").read_text())
        moved = tmp_path / "run"
        moved.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (moved / name).write_bytes((run / name).read_bytes())
        (moved / "text.json").write_text(json.dumps({**memory, "folder": str(tmp_path / "gone")}))
        monkeypatch.setenv("HEADCODE_TEXTS", str(tmp_path / "empty"))
        assert "prepare the text again" in fails(capsys, "resume", moved)

    def test_other_runs(self, tmp_path, capsys):
        out = tmp_path / "logic"
        flags = ["--num-points", "5", "--dim", "8", "--backend", "reference", "--steps", "1", "--eval-size", "0"]
        main(["train", "logic", *flags, "--out", str(out), "--threads", "1"])
        capsys.readouterr()
        assert "is a run of logic; text comes from runs of lm" in fails(capsys, "generate", out)


def fails_with(capsys, *arguments):
    """One sentence; lines on the cost may stand before it."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("headcode: ") and "Traceback" not in last
    return last


def test_threads_are_left_as_they_were(run, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        main(["generate", str(run), "--max-tokens", "1", "--threads", "1"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
