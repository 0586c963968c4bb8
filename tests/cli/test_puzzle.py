"""`headcode puzzle`: the drawing, the pictures, and one line for every mistake."""

import pytest


def test_a_puzzle_hides_its_answer_unless_asked(run):
    code, hidden, _ = run("puzzle", "--instance", "7")
    assert code == 0
    assert "│ 6 6 1 5 │ 6 2 5 7 │ ? ? ? ? │" in hidden
    assert "exactly one answer" in hidden
    _, shown, _ = run("puzzle", "--instance", "7", "--answer")
    assert "│ 6 6 1 5 │ 6 2 5 7 │ 6 2 3 0 │" in shown
    assert "constant, sum, +1, +1" in shown
    assert "6 2 3 0  with probability 1.0000" in shown


def test_an_ambiguous_puzzle_says_so(run):
    outputs = [run("puzzle", "--num-features", "2", "--num-values", "3", "--instance", str(n))[1] for n in range(12)]
    assert any("answers; the best guess is right with" in text for text in outputs)


def test_pictures_are_written(run, tmp_path):
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    code, text, _ = run("puzzle", "--out", str(png), str(svg))
    assert code == 0
    assert f"wrote {png}" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_a_function_is_shown_and_drawn(run, tmp_path):
    path = tmp_path / "f.png"
    options = ("logic", "--split", "novel", "--num-points", "5", "--variables", "1", "3", "--out", str(path))
    code, text, _ = run("puzzle", *options)
    assert code == 0
    assert text.splitlines()[5].endswith("?")
    assert path.exists()
    _, shown, _ = run("puzzle", *options[:5], "--answer")
    assert "f = (" in shown
    assert "?" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--split", "test"), "has no split 'test'"),
        (("--instance", "-1"), "counts from 0"),
        (("--num-features", "0"), "num_features must lie in 1..12, got 0"),
        (("--num-values", "3", "--grid", "4"), "distribute"),
        (("--held-out", "1.5"), "share"),
        (("--num-points", "8"), "no --num-points"),
        (("logic", "--grid", "3"), "no --grid"),
        (("--out", "puzzle.gif"), ".png or .svg"),
        (("checkers",), "sraven"),
        (("--instance", "one"), "one"),
    ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(run, arguments, sentence):
    code, _, error = run("puzzle", *arguments)
    assert code == 2
    assert error.startswith("headcode: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert "Traceback" not in error


def test_help_shows_an_example(run):
    code, text, _ = run("puzzle", "--help")
    assert code == 0
    assert "headcode puzzle --instance 7 --answer --out puzzle.png" in " ".join(text.split())


def test_models_answer_it_too(run):
    import headcode
    from headcode.train.folder import read_run_config

    names = ("zoo/sraven-4-hyla", "zoo/sraven-4-softmax")
    code, text, _ = run("puzzle", "--model", *names, "--instance", "3", "--answer")
    batch = read_run_config(names[0]).task.instances("compositional", [3])
    assert code == 0
    for name in names:
        said = headcode.load(name)(batch.x, queries=slice(-4, None)).argmax(-1)[0].tolist()
        right = "right" if said == batch.y[0].tolist() else "wrong"
        assert f"{name} says {' '.join(map(str, said))}: {right}\n" in text
    _, hidden, _ = run("puzzle", "--model", "zoo/logic-hyla")
    line = next(line for line in hidden.splitlines() if line.startswith("zoo/logic-hyla says "))
    value = headcode.load("zoo/logic-hyla")(
        read_run_config("zoo/logic-hyla").task.instances("compositional", [0]).x, queries=slice(-1, None)
    )
    assert line == f"zoo/logic-hyla says {value.item():.3f}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "zoo/sraven-4-hyla", "--num-features", "2"), "leave out --num-features"),
        (("--model", "zoo/sraven-4-hyla", "--seed", "2"), "leave out --seed"),
        (("--model", "zoo/sraven-4-hyla", "zoo/logic-hyla"), "were trained on different tasks; show one of them"),
        (("--model", "zoo/logic-hyal"), "The zoo has no model 'logic-hyal'; did you mean 'logic-hyla'?"),
    ],
)
def test_mistakes_about_models(run, arguments, sentence):
    code, _, error = run("puzzle", *arguments)
    assert code == 2 and sentence in error and error.count("\n") == 1
