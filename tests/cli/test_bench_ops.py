"""`headcode bench ops`: a table that can be trusted, or none."""

import csv

import pytest
import torch

from headcode.bench import ops as bench_ops
from headcode.cli import main
from headcode.ops import cpu

ARGUMENTS = ["bench", "ops", "--no-memory", "--no-growth", "--repeats", "5", "--methods", "hyla", "--shapes", "3,2,9,3"]


def test_table_csv_and_plot(tmp_path, capsys):
    main([*ARGUMENTS, "--lengths", "2048", "4096", "--out", str(tmp_path / "bench"), "--threads", "1"])
    printed = capsys.readouterr().out
    assert "× reference" in printed and "B3 H2 T9 D3" in printed
    rows = list(csv.DictReader((tmp_path / "bench" / "ops.csv").open(encoding="utf-8")))
    table = [row for row in rows if row["shape"] == "B3 H2 T9 D3"]
    assert [row["backend"] for row in table] == ["reference", "chunked", "cpu", "torch"]
    by_name = {row["backend"]: row for row in table}
    for row in table:
        assert float(row["milliseconds"]) > 0 and row["threads"] == "1" and row["repeats"] == "5"
        assert row["peak_megabytes"] == ""
        ratio = float(row["milliseconds"]) / float(by_name["torch"]["milliseconds"])
        assert float(row["relative_to_torch"]) == pytest.approx(ratio)
    faster = float(by_name["reference"]["milliseconds"]) / float(by_name["cpu"]["milliseconds"])
    assert float(by_name["cpu"]["times_faster_than_reference"]) == pytest.approx(faster)
    assert 0 < float(by_name["cpu"]["forward_error"]) < 1e-5
    assert (tmp_path / "bench" / "cost-against-length.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(autouse=True)
def small_lengths(monkeypatch):
    """The plot's rows as small as may be: 4096 tokens are a benchmark, not a test."""
    measure = bench_ops.Ops._measure

    def shrunk(self, shape, method, memory):
        return measure(self, shape._replace(batch=1, length=min(shape.length, 9), heads=2), method, memory)

    monkeypatch.setattr(
        bench_ops.Ops,
        "_measure",
        lambda self, shape, method, memory: (measure if shape.heads == 2 else shrunk)(self, shape, method, memory),
    )


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("headcode: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_wrong_kernel_is_not_timed(tmp_path, capsys, monkeypatch, part):
    right = getattr(cpu, part)

    def wrong(*arguments, **options):
        right(*arguments, **options)
        buffer = options["out"] if part == "forward" else options["gradients"].k
        buffer[..., -1, -1] *= 1.01

    monkeypatch.setattr(cpu, part, wrong)
    error = fails(capsys, *ARGUMENTS, "--out", str(tmp_path / "bench"))
    assert "The cpu backend is wrong for hyla at B3 H2 T9 D3 and is not timed" in error
    assert not (tmp_path / "bench" / "ops.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "3"], "--repeats must be at least 5"),
        (["--methods", "magic"], "--methods must be of softmax, linear"),
        (["--shapes", "1,2,3"], "--shapes must be batch,heads,length,width"),
        (["--shapes", "1,2,3,x"], "got '1,2,3,x'"),
    ],
)
def test_mistakes(arguments, words, capsys, tmp_path):
    assert words in fails(capsys, "bench", "ops", "--out", str(tmp_path / "bench"), *arguments)


def test_what_can_be_measured(capsys):
    assert "no measurement called 'speed'; choose one of: ops, " in fails(capsys, "bench", "speed")
    with pytest.raises(SystemExit) as stopped:
        main(["bench"])
    assert stopped.value.code == 0
    assert "headcode bench ops" in capsys.readouterr().out


def test_threads_are_put_back(tmp_path):
    before = torch.get_num_threads()
    main([*ARGUMENTS, "--lengths", "--out", str(tmp_path), "--threads", str(before + 1)])
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_peak_memory_counts_what_a_call_takes():
    shape = bench_ops.Shape(1, 2, 2048, 2)
    plain, fused = (bench_ops.peak_memory(shape, "hyla", backend) for backend in ("reference", "cpu"))
    # One float32 matrix per head is 33.5 MB, and the plain op keeps several for its gradient.
    assert plain > 100 > 10 > fused
