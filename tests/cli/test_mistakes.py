"""What the command line says to mistakes: one sentence, with what is allowed, and a near word if there is one."""

import contextlib
import subprocess
import sys

import pytest

from tests.support.commands import fails

SAID = [
    (["trian"], "There is no command 'trian'; did you mean 'train'? The commands are: demo, train, "),
    (["xyzzy"], "There is no command 'xyzzy'; the commands are: demo, train, "),
    (["train", "lgoic"], "no task 'lgoic'; did you mean 'logic'? The tasks are: logic, sraven, lm, scan, graph."),
    (["train", "sacn"], "There is no task 'sacn'; did you mean 'scan'? "),
    (["train", "scan", "--scan-split", "jmp"], "one of simple, jump, turn_left, around_right, length, got 'jmp'."),
    (["train", "graph", "--generation", "3"], "did you mean --generations? "),
    (["train", "logic", "--preset", "logic-smal"], "did you mean 'logic-small'? The presets of logic are: logic, "),
    (["train", "logic", "--steps", "abc"], "--steps must be a whole number, got 'abc'."),
    (["train", "logic", "--steps=1.5"], "--steps must be a whole number, got '1.5'."),
    (["train", "logic", "--learning-rate", "fast"], "--learning-rate must be a number, got 'fast'."),
    (["train", "logic", "--clip-norm", "x"], "--clip-norm must be a number, or None, got 'x'."),
    (["train", "logic", "--optimizer", "sgd"], "--optimizer must be one of adamw, muon, got 'sgd'."),
    (["train", "logic", "--steps"], "--steps needs a value: a whole number."),
    (["train", "logic", "--num-pionts", "3"], "has no option --num-pionts; did you mean --num-points? "),
    (["train", "logic", "--num_pionts", "3"], "has no option --num-pionts; did you mean --num-points? "),
    (["train", "logic", "--frobnicate"], "has no option --frobnicate. headcode train logic --help"),
    (["train", "logic", "-s", "3"], "headcode train logic has no option -s. "),
    (["train", "logic", "extra"], "was given words that it does not know in 'extra'. "),
    (["eval"], "headcode eval needs RUN-FOLDER; headcode eval --help shows what there is."),
    (["eval", "zoo/logic-hyla", "--size", "ten"], "--size must be a whole number, or None, got 'ten'."),
    (["eval", "zoo/logic-hyal"], "The zoo has no model 'logic-hyal'; did you mean 'logic-hyla'? It has: "),
    (["codes", "x", "--map", "sne"], "--map must be one of tsne, pca, umap, or None, got 'sne'."),
    (["codes", "x", "--layers", "0", "one"], "must be several values, each a whole number, or None, got '0 one'."),
    (["puzzle", "sravn"], "task must be one of sraven, logic, scan, graph, got 'sravn'."),
    (["puzzle", "--instance", "one"], "--instance must be a whole number, got 'one'."),
    (["bench", "lmm"], "no measurement called 'lmm'; did you mean 'lm'? Choose one of: ops, scale, widths, train, "),
    (["reproduce", "head"], "There is no experiment 'head'; did you mean 'heads'? The experiments are: "),
    (["sweep", "logic", "--set", "metod=hyla"], "A logic run has no field 'metod'; did you mean 'method'? It has: "),
    (["sweep", "logic", "--set", "steps=abc"], "steps must be a whole number, got 'abc'."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), SAID, ids=[" ".join(arguments) for arguments, _ in SAID])
def test_a_mistake_is_told_in_plain_words(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fails(capsys, *arguments)
    assert words in said
    assert not list(tmp_path.iterdir())


LIGHT = ["eval", "generate", "info", "resume", "sweep", "results", "codes", "decode", "lens", "score", "report"]
LIGHT += ["explore", "demo"]


def test_help_needs_no_torch():
    """Of every command whose flags do not depend on tasks and presets."""
    code = f"""
import contextlib, io, sys
from headcode.cli import main
for name in {LIGHT}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main([name, "--help"])
    assert "Example" in said.getvalue(), name
print([name for name in ("torch", "numba", "matplotlib", "sklearn") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_flags_of_a_training_stand_in_groups(capsys):
    from headcode.cli import main

    with pytest.raises(SystemExit):
        main(["train", "logic", "--help"])
    said = capsys.readouterr().out
    places = [said.index(f" {title} options ") for title in ("run", "task", "model", "optimiser")]
    assert places == sorted(places)
    bounds = [*places, len(said)]
    for group, flags in enumerate(("--steps --seed", "--num-points --held-out", "--method --dim", "--learning-rate")):
        for flag in flags.split():
            assert bounds[group] < said.index(f" {flag} ", places[0]) < bounds[group + 1], flag
    assert said.index(" --out ") < places[0]


@pytest.mark.parametrize("arguments", [[], ["train", "logic"], ["decode"], ["sweep"], ["train"]], ids=" ".join)
def test_tables_of_help_fit_80_columns(arguments, capsys, monkeypatch):
    from headcode.cli import main

    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
    lines = capsys.readouterr().out.splitlines()
    # The sentences above it, and commands to copy, are whole lines.
    headings = ("commands:", "presets:", " options ", " positional arguments ")
    first = next(i for i, line in enumerate(lines) if any(h in line for h in headings))
    assert len(lines) > first + 5 and [line for line in lines[first:] if len(line) > 80] == []
