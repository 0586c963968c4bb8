"""`bench gpu`, `bench ops --device cuda` and `bench kernels` on a machine without a GPU; the roofline by hand."""

import os
import subprocess
import sys

import pytest
import torch

from headcode.bench import gpu, roofline
from headcode.bench.measure import medians
from headcode.bench.ops import Shape
from headcode.cli import bench, main


@pytest.mark.parametrize("arguments", [["ops", "--device", "cuda"], ["gpu"]])
def test_without_a_gpu_one_sentence_and_exit_2(arguments, capsys):
    if torch.cuda.is_available():
        arguments = [*arguments, "--repeats", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "There is no NVIDIA GPU that torch can use here" in error or "--repeats" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.triton
def test_kernels_are_not_compiled_where_they_are_interpreted():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    command = [sys.executable, "-m", "headcode", "bench", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 2 and "unset it" in done.stderr and "Traceback" not in done.stderr


def test_a_measurement_of_the_repository_is_not_in_an_installed_package(monkeypatch, capsys):
    monkeypatch.setitem(bench.KINDS, "kernels", ("benchmarks/gone.py", "Kernels", ""))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "kernels"])
    assert stop.value.code == 2
    assert "is benchmarks/gone.py in the repository, and not part of an installed headcode" in capsys.readouterr().err


def test_work_counted_by_hand():
    """HYLA forward: scores, mixing and output, 3 products of length D for each pair and head, 2 operations each."""
    forward = roofline.work("hyla", 2, 3, 5, 7, "float32", backward=False)
    assert forward.operations == 2 * 3 * (2 * 5 * 5) * 3 * 7
    assert forward.bytes == 4 * 4 * (2 * 5 * 3 * 7)
    # Backward: queries 1+4+1, keys 1+4+2, and a band 1+4 products more.
    both = roofline.work("hyla", 2, 3, 5, 7, "bfloat16")
    assert both.operations == (3 + 6 + 7) * 2 * (2 * 5 * 5) * 3 * 7
    assert both.bytes == (4 + 5 + 6) * 2 * (2 * 5 * 3 * 7)
    assert roofline.work("hyla", 2, 3, 5, 7, "float32", band=True).operations == both.operations / 16 * 21
    # Softmax: a first pass over the scores, linear 2 + 3 + 4; with two layers another pass for delta.
    assert roofline.work("softmax", 1, 1, 1, 1, "float32").operations == 2 * (3 + 3 + 4)
    assert roofline.work("softmax_hyla", 1, 1, 1, 1, "float32").operations == 2 * (4 + 6 + 7 + 5)


def test_the_roofline_takes_the_slower_of_arithmetic_and_memory():
    device = roofline.Device("test", float32=100.0, tf32=1000.0, half=2000.0, bandwidth=10.0)
    task = roofline.Work(operations=1000.0, bytes=20.0)
    assert task.intensity == 50.0
    assert roofline.best_seconds(task, device, "float32", 64) == (10.0, "arithmetic")
    assert roofline.best_seconds(task, device, "tf32", 64) == (2.0, "memory")
    assert roofline.best_seconds(task, device, "bfloat16", 8) == (10.0, "arithmetic")
    assert roofline.best_seconds(roofline.Work(1000.0, 1.0), device, "bfloat16", 16) == (0.5, "arithmetic")


def test_the_table_shows_the_roofline_beside_the_time():
    row = gpu.Row(str(Shape(1, 2, 3, 4)), "hyla", "float32", "triton", 2.0, 0.5, "arithmetic", 7.0)
    assert gpu.line(row).split() == ["B1", "H2", "T3", "D4", "hyla", "float32", "triton", "2.000", "0.500", "25%", "7"]


def test_contestants_take_turns_and_agree_with_their_names(monkeypatch):
    """Everything but the Triton kernels runs on any device; compiled, the reference needs a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    runs = gpu.contestants(Shape(1, 2, 5, 4), "hyla", "float32", "cpu")
    assert list(runs)[:5] == ["triton", "chunked", "reference", "compiled reference", "torch softmax"]
    order = []
    del runs["triton"]
    runs = {name: lambda name=name, run=run: (order.append(name), run()) for name, run in runs.items()}
    times = medians(runs, 5, warmup=3)
    assert order == list(runs) * 8 and all(seconds > 0 for seconds in times.values())
