"""Kernels by their names: two processes share the compilation, and none depends on the other."""

import os
import subprocess
import sys

import pytest

from headcode.ops.cpu import library
from headcode.ops.cpu.library import KernelName

CLAIM = """
import json, sys
from headcode.ops.cpu.library import KernelName
from headcode.ops.cpu.records import Variant
for module, name, variant in json.loads(sys.argv[-1]):
    print(KernelName(module, name, Variant(*variant) if isinstance(variant, list) else variant), flush=True)
"""
TRAIN = """
import headcode, torch
from headcode.ops.cpu import library
from headcode.nn import ModelConfig, Transformer
torch.manual_seed(0)
torch.set_num_threads(1)
model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=7, num_layers=2))
{change}
model(torch.randn(3, 7, 5), queries=slice(-1, None)).square().mean().backward()
print(sum(parameter.grad.double().abs().sum().item() for parameter in model.parameters()))
print(len(library._helpers))
"""
# Instead of another process, one that ends at once, is never there, or says that it begins everything and then dies.
CHANGES = {
    "as it is": "",
    "one processor": "library.os.cpu_count = lambda: 1",
    "no process": "library.subprocess.Popen = lambda *a, **k: (_ for _ in ()).throw(OSError())",
    "fails": "library.safe_python = lambda: ['false']",
    "claims and dies": "library.safe_python = lambda: [__import__('sys').executable, '-c', CLAIM]",
}


@pytest.mark.slow
def test_first_step_is_the_same_whoever_compiles(tmp_path):
    found = {}
    for name, change in CHANGES.items():
        environment = os.environ | {"HEADCODE_CACHE_DIR": str(tmp_path / name.replace(" ", "-"))}
        command = [sys.executable, "-c", TRAIN.format(change=f"CLAIM = {CLAIM!r}\n{change}")]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, (name, run.stderr)
        found[name] = run.stdout.split()
    assert len({gradient for gradient, _ in found.values()}) == 1, found
    kept = {name: len(list((tmp_path / name.replace(" ", "-")).rglob("*.nbc"))) for name in CHANGES}
    assert set(kept.values()) == {kept["as it is"]} and kept["as it is"] >= 8


def test_nothing_is_started_for_kernels_that_are_there(monkeypatch):
    monkeypatch.setattr(library.subprocess, "Popen", None)  # would fail if it were called
    kernels = [KernelName("gemm", "SUM_KERNELS", double) for double in (False, True)]
    for kernel in kernels:
        library.address(kernel)
    library.compile_beside(kernels)
    monkeypatch.setattr(library, "may_be_kept", lambda room: False)
    library.compile_beside([KernelName("no", "such"), KernelName("no", "other")])


def test_nothing_is_started_for_kernels_that_cannot_be_kept_but_are_compiled(monkeypatch):
    """A new shape asks for the same kernels again, and the disk is full."""
    monkeypatch.setattr(library.subprocess, "Popen", None)
    kernels = [KernelName("gemm", "SUM_KERNELS", double) for double in (False, True)]
    for kernel in kernels:
        library.address(kernel)
    monkeypatch.setattr(library, "may_be_kept", lambda room: True)
    monkeypatch.setattr(library, "is_kept", lambda kernel: False)
    library.compile_beside(kernels)


@pytest.mark.parametrize(("executable", "frozen"), [(None, False), ("", False), (sys.executable, True)])
def test_nothing_is_started_where_python_is_inside_another_program(monkeypatch, executable, frozen):
    monkeypatch.setattr(library.subprocess, "Popen", None)
    monkeypatch.setattr(library, "may_be_kept", lambda room: True)
    monkeypatch.setattr(library, "is_kept", lambda kernel: False)
    monkeypatch.setattr(KernelName, "find", lambda kernel: kernel.name)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    library.compile_beside([KernelName("no", "such"), KernelName("no", "other")])


class Process:
    def __init__(self, alive):
        self.alive = alive

    def poll(self):
        return None if self.alive else 1


@pytest.fixture
def helper(monkeypatch):
    """A helper of four kernels whose process says what a test writes into its pipe; and what is compiled here."""
    kernels = [KernelName("room", name) for name in "abcd"]
    kept, here = set(), []
    monkeypatch.setattr(KernelName, "find", lambda kernel: kernel.name)
    monkeypatch.setattr(library, "is_kept", lambda name: name in kept)
    monkeypatch.setattr(library, "address_of", lambda name: here.append(name) or kept.add(name))
    made = object.__new__(library._Helper)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    made._left, made._pipe, made._said, made._process = list(kernels), reader, "", Process(alive=True)
    made.kernels, made.kept, made.here = dict(zip("abcd", kernels, strict=True)), kept, here
    made.say = lambda name: os.write(writer, f"{made.kernels[name]}\n".encode())
    yield made
    os.close(reader)
    os.close(writer)


def test_a_kernel_that_nobody_has_begun_is_compiled_here(helper):
    helper.wait_for(helper.kernels["a"])
    assert helper.here == [] and helper.kernels["a"] not in helper._left  # the caller compiles it


def test_while_a_kernel_is_compiled_there_the_last_others_are_compiled_here(helper, monkeypatch):
    helper.say("a")

    def sleep(seconds):
        assert helper.here == ["d", "c", "b"]
        helper.kept.add("a")

    monkeypatch.setattr(library.time, "sleep", sleep)
    helper.wait_for(helper.kernels["a"])
    assert helper.here == ["d", "c", "b"] and "a" in helper.kept


def test_what_has_been_begun_there_is_not_compiled_here(helper, monkeypatch):
    for name in "abd":
        helper.say(name)
    monkeypatch.setattr(library.time, "sleep", lambda seconds: helper.kept.add("a"))
    helper.wait_for(helper.kernels["a"])
    assert helper.here == ["c"]


def test_a_process_that_died_is_not_waited_for(helper):
    for name in "abcd":
        helper.say(name)
    helper._process = Process(alive=False)
    helper.wait_for(helper.kernels["a"])
    assert helper.here == [] and helper.kept == set()


def test_a_process_that_hangs_is_not_waited_for_without_end(helper, monkeypatch):
    for name in "abcd":
        helper.say(name)
    slept = []
    monkeypatch.setattr(library.time, "sleep", lambda seconds: slept.append(seconds) or len(slept) < 10_000 or 1 / 0)
    helper.wait_for(helper.kernels["a"])
    assert helper.here == [] and 50 < sum(slept) < 70
