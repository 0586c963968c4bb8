"""The command line: help, mistakes in one line, and `info`."""

import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from headcode import ModelConfig, Transformer
from headcode.cli import COMMANDS, main
from headcode.interop import to_reference
from headcode.nn import forward_flops, save_model
from tests.support.files import flip, truncate

CONFIG = ModelConfig(input_dim=5, output_dim=1, max_length=16)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("headcode: ") and captured.err.count("\n") == 1
    return captured.err


def test_overview_lists_every_command(capsys):
    main([])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    main(["--version"])
    assert capsys.readouterr().out.startswith("headcode 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "Example" in out and f"headcode {command}" in out


def test_mistakes_are_one_line(capsys, tmp_path):
    assert "no command 'trian'" in fails(capsys, "trian")
    assert "--lenght" in fails(capsys, "info", "x", "--lenght", "3")
    assert "does not exist" in fails(capsys, "info", str(tmp_path / "nothing"))
    assert "not a model folder" in fails(capsys, "info", str(tmp_path))
    (tmp_path / "junk.npz").write_bytes(b"junk")
    assert "not an .npz file" in fails(capsys, "info", str(tmp_path / "junk.npz"))
    assert "--length must be at least 1 and at most a billion, got 0" in fails(
        capsys, "info", str(tmp_path), "--length", "0"
    )


@pytest.mark.parametrize("damage", ["truncated", "flipped", "npy", "text", "scalar", "integers"])
def test_damaged_parameters_are_one_line(capsys, tmp_path, damage):
    params = to_reference(Transformer(CONFIG))
    path = tmp_path / "params.npz"
    if damage == "scalar":
        params["transformer_block_0/relative_embedding/rel_embedding"] = np.float32(1)
    if damage == "integers":
        params["logitdense/bias"] = np.zeros(1, int)
    np.savez_compressed(path, **params)
    if damage == "truncated":
        truncate(path)
    if damage == "flipped":
        flip(path, fraction=3, bits=255)
    if damage == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    if damage == "text":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("readme.txt", "hello")
    fails(capsys, "info", str(path))


def test_info_on_a_model_folder_and_on_authors_parameters(capsys, tmp_path):
    model = Transformer(CONFIG)
    save_model(model, tmp_path / "model")
    np.savez(tmp_path / "params.npz", **to_reference(model))
    for path in ("model", "params.npz"):
        main(["info", str(tmp_path / path)])
        out = capsys.readouterr().out
        assert "151,009" in out and f"{forward_flops(CONFIG, 16) / 16:,.0f}" in out
        assert "blocks.1.attention.query_proj.weight" in out and "16 × 128" in out
        main(["info", str(tmp_path / path), "--length", "7", "--json"])
        facts = json.loads(capsys.readouterr().out)
        assert facts["parameters"] == 151_009
        assert facts["flops_per_token"] == pytest.approx(forward_flops(CONFIG, 7) / 7)
        assert facts["shapes"]["embedding.weight"] == [128, 5]


def test_module_entry_point_and_a_closed_pipe(tmp_path):
    save_model(Transformer(CONFIG), tmp_path)
    command = f"{sys.executable} -m headcode info {tmp_path} | head -1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert run.stdout == "parameters       151,009\n" and run.stderr == ""


def closed_pipe(*arguments, **options):
    """A command whose output nobody reads from the start: its exit code and what it says on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run([sys.executable, "-m", "headcode", *arguments], stdout=writer, text=True, **options)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--version",),
        ("help",),
        ("info", "--help"),
        ("train", "--help"),
        ("train", "logic", "--help"),
        ("reproduce",),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_every_command_in_silence(arguments):
    run = closed_pipe(*arguments, stderr=subprocess.PIPE)
    assert (run.stderr, run.returncode) == ("", 141)


def test_a_closed_pipe_with_more_output_than_it_holds(tmp_path):
    rows = "".join(f"run{number},{number}\n" for number in range(20_000))
    (tmp_path / "results.csv").write_text("name,loss\n" + rows)
    for options in ([], ["--json"]):
        run = closed_pipe("results", str(tmp_path), *options, stderr=subprocess.PIPE)
        assert (run.stderr, run.returncode) == ("", 141)


def test_a_closed_pipe_of_errors_too():
    assert closed_pipe("trian", stderr=subprocess.STDOUT).returncode == 141


def test_no_output_at_all():
    """With stdout closed, as by `>&-`, there is no stream to flush."""
    run = subprocess.run(f"{sys.executable} -m headcode --version >&-", shell=True, capture_output=True, text=True)
    assert (run.stderr, run.returncode) == ("", 0)


def test_ctrl_c_is_not_a_traceback(monkeypatch, capsys):
    import headcode.cli.info

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(headcode.cli.info.Command, "run", interrupted)
    with pytest.raises(SystemExit) as exit_:
        headcode.cli.main(["info", "somewhere"])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "headcode: interrupted.\n"
