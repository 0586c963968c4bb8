"""The comparison that comes before `auto` relies on the Triton kernels, on a simulated device: Triton's interpreter.

Not collected by itself: `test_gpu_values.py` runs this file in a process of its own, with TRITON_INTERPRET=1.
"""

import errno
import json
import logging

import pytest
import torch

from headcode.jit import private_folder
from headcode.ops import chunked, explain_backend, hyper_attention
from headcode.ops.triton import backend as gpu
from headcode.ops.triton import checked, plan, tuning
from headcode.ops.triton.checked import AGREES, Kind, compare

assert gpu.INTERPRETED
HYLA = Kind("float32", 3, 2, 2, "rms_head", "relu", "sum", False, False, False, False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    """`auto` takes Triton on the simulated device, where nothing has been compared yet."""
    monkeypatch.setenv("HEADCODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu, "avoided", lambda problem: None)
    new_process(monkeypatch)
    return tmp_path


def new_process(monkeypatch):
    private_folder.cache_clear()
    monkeypatch.setattr(checked, "_outcomes", {})
    monkeypatch.setattr(checked, "_warned", False)


def inputs(requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 2, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def wrong_epsilon(monkeypatch):
    """A kernel that is wrong: the same code with another constant in its norm."""
    monkeypatch.setattr(plan, "RMS_EPSILON", 0.1)


def wrong_values(monkeypatch):
    """A kernel that is wrong in one gradient alone."""
    load = plan.load_kernel

    class Wrong:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(**arguments):
                self.kernel[grid](**arguments)
                arguments["grad_v"].mul_(1.01)

            return launch

    monkeypatch.setattr(plan, "load_kernel", lambda name: Wrong(load(name)) if name == "key_kernel" else load(name))


def watch(monkeypatch, function):
    kinds = []
    monkeypatch.setattr(checked, "compare", lambda kind, device: kinds.append(kind) or function(kind, device))
    return kinds


@pytest.fixture
def compared(monkeypatch):
    """The kinds that were compared."""
    return watch(monkeypatch, compare)


@pytest.fixture
def agreed(monkeypatch):
    """The kinds that would have been compared, and agree without it."""
    return watch(monkeypatch, lambda kind, device: AGREES)


def recorded(calls, label, function):
    return lambda *arguments, **options: calls.append(label) or function(*arguments, **options)


def served_by(monkeypatch):
    """What is called from now on."""
    served = []
    for module, name in ((gpu, "triton"), (chunked, "chunked")):
        for part in ("forward", "backward"):
            function, label = getattr(module, part), f"{name} {part}"
            monkeypatch.setattr(module, part, recorded(served, label, function))
    return served


EVERYTHING = {"pooling": "mean", "masked": True, "band": True, "causal": True, "dropout": True}
WIDE = {"qk_width": 17, "v_width": 19, "norm": "softmax", "value_net": "linear"}


@pytest.mark.parametrize(
    ("arithmetic", "changes"),
    [
        ("float32", EVERYTHING),
        ("bfloat16", WIDE),
        *(pytest.param(name, {**WIDE, **EVERYTHING}, marks=pytest.mark.slow) for name in checked.BOUNDS),
        *(pytest.param(name, {**WIDE, "value_net": "gelu"}, marks=pytest.mark.slow) for name in checked.BOUNDS),
        *(pytest.param(name, {"norm": "none", "heads": 1}, marks=pytest.mark.slow) for name in checked.BOUNDS),
        *(pytest.param(name, {"heads": 1, **EVERYTHING}, marks=pytest.mark.slow) for name in checked.BOUNDS),
    ],
)
def test_right_kernels_agree(arithmetic, changes):
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        assert compare(HYLA._replace(arithmetic=arithmetic, **changes), CPU) == AGREES
    finally:
        torch.set_float32_matmul_precision("highest")


def test_it_is_compared_once_for_each_kind_and_then_serves(compared, monkeypatch, new_machine, caplog):
    q, k, v = inputs()
    assert explain_backend(q, k, v).reason.endswith("if it agrees with the reference at its first call here")
    with caplog.at_level(logging.WARNING, logger="headcode"):
        for _ in range(2):
            out = hyper_attention(q, k, v)
            torch.testing.assert_close(out, hyper_attention(q, k, v, backend="reference"))
            torch.autograd.grad(out.sum(), (q, k, v))
    assert compared == [HYLA] and caplog.records == []
    choice = explain_backend(q, k, v)
    assert choice.name == "triton" and choice.reason.endswith("it was compared with the reference here, and agrees")
    hyper_attention(q, k, v, causal=True)
    assert compared == [HYLA, HYLA._replace(causal=True)]
    new_process(monkeypatch)  # remembers by the files
    served = served_by(monkeypatch)
    torch.autograd.grad(hyper_attention(q, k, v).sum(), (q, k, v))
    assert len(compared) == 2 and served == ["triton forward", "triton backward"]
    assert len(list((new_machine / "gpu-checks").iterdir())) == 2


@pytest.mark.parametrize(("wrong", "what"), [(wrong_epsilon, "the output"), (wrong_values, "the gradient of v")])
def test_a_wrong_kernel_is_found_named_once_and_never_serves(wrong, what, monkeypatch, caplog):
    wrong(monkeypatch)
    q, k, v = inputs()
    wanted = hyper_attention(q, k, v, backend="chunked")
    exact = torch.autograd.grad(wanted.sum(), (q, k, v))
    for _ in range(2):  # the second time in a process that knows by the file
        with caplog.at_level(logging.WARNING, logger="headcode"):
            for _ in range(2):
                out = hyper_attention(q, k, v)
                assert torch.equal(out, wanted)
                for found, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), exact, strict=True):
                    assert torch.equal(found, right)
        (warning,) = caplog.records
        message = warning.getMessage()
        assert "uses the chunked backend in place of the Triton kernels" in message
        assert f"{what} differs from the reference's by 0." in message and "headcode bench gpu" in message
        assert "norm=rms_head, value_net=relu" in message and "headcode info" in message
        choice = explain_backend(q, k, v)
        assert choice.name == "chunked" and choice.rejected["triton"].startswith(f"{what} differs")
        caplog.clear()
        new_process(monkeypatch)
    asked = explain_backend(q, k, v, backend="triton")
    assert asked.name == "triton" and "not compared" in asked.reason  # whoever names it gets it


def test_a_kernel_that_fails_is_as_good_as_wrong_but_only_for_this_process(monkeypatch, caplog, compared):
    q, k, v = inputs()
    with monkeypatch.context() as patch:
        patch.setattr(plan, "load_kernel", lambda name: (_ for _ in ()).throw(RuntimeError("no such\ninstruction")))
        assert torch.equal(hyper_attention(q, k, v), hyper_attention(q, k, v, backend="chunked"))
        assert "it failed: RuntimeError: no such instruction" in caplog.records[0].getMessage()
    hyper_attention(q, k, v)
    assert explain_backend(q, k, v).name == "chunked" and len(compared) == 1
    new_process(monkeypatch)
    hyper_attention(q, k, v)
    assert explain_backend(q, k, v).name == "triton" and len(compared) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x80\x04}.", b"[" * 100_000, b"[1]", b'{"identity": "x", "outcome": ""}']
)
def test_a_damaged_file_is_no_outcome(content, agreed, monkeypatch, new_machine):
    q, k, v = inputs()
    hyper_attention(q, k, v)
    (file,) = (new_machine / "gpu-checks").iterdir()
    assert json.loads(file.read_text())["outcome"] == AGREES
    file.write_bytes(content)
    new_process(monkeypatch)
    hyper_attention(q, k, v)
    assert len(agreed) == 2 and json.loads(file.read_text())["outcome"] == AGREES


def test_a_full_disk_costs_the_memory_alone(agreed, monkeypatch, new_machine):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("json.dump", lambda *arguments: full(0))
    hyper_attention(*inputs())
    assert len(agreed) == 1 and list((new_machine / "gpu-checks").iterdir()) == []


@pytest.mark.filterwarnings("ignore:Comparisons of GPU kernels are not kept on disk")
def test_a_folder_that_others_may_write_is_not_believed(agreed, monkeypatch, new_machine):
    q, k, v = inputs()
    for mode, comparisons in ((0o700, 1), (0o700, 1), (0o777, 2), (0o777, 3)):
        if agreed:
            (new_machine / "gpu-checks").chmod(mode)
        new_process(monkeypatch)
        hyper_attention(q, k, v)
        assert len(agreed) == comparisons


def test_a_folder_that_cannot_be_written_costs_the_memory_alone(agreed, monkeypatch, new_machine):
    (new_machine / "gpu-checks").write_text("in the way")
    q, k, v = inputs()
    hyper_attention(q, k, v)
    hyper_attention(q, k, v)
    assert len(agreed) == 1 and explain_backend(q, k, v).name == "triton"


def test_another_driver_or_version_is_compared_anew(agreed, monkeypatch):
    q, k, v = inputs()
    known = checked.environment(CPU)
    for change in ({}, {"driver": "12090"}, {"torch": "9.9"}, {"sources": "0"}, {"device": "another"}, {}):
        monkeypatch.setattr(checked, "environment", lambda device, change=change: {**known, **change})
        new_process(monkeypatch)
        hyper_attention(q, k, v)
    assert len(agreed) == 5


@pytest.mark.parametrize("around", ["no_grad", "inference_mode", "autocast", "compile", "fake", "default device"])
def test_nothing_of_the_caller_is_at_work_in_the_comparison(around, compared, monkeypatch):
    served = served_by(monkeypatch)
    q, k, v = inputs(requires_grad=False)
    wanted = hyper_attention(q, k, v, backend="reference")
    if around == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: hyper_attention(q, k, v), backend="aot_eager", fullgraph=True)
        out = compiled(q, k, v)
    elif around == "fake":
        with torch._subclasses.FakeTensorMode() as mode:
            hyper_attention(*(mode.from_tensor(t) for t in (q, k, v)))
        assert compared == []
        out = hyper_attention(q, k, v)
    else:
        contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        contexts |= {
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
            "default device": lambda: torch.device("meta"),
        }
        with contexts[around]():
            out = hyper_attention(q, k, v)
    torch.testing.assert_close(out, wanted)
    assert compared == [HYLA] and served[-1] == "triton forward" and explain_backend(q, k, v).name == "triton"


def test_a_compiled_graph_finds_a_wrong_kernel_when_it_runs(monkeypatch):
    wrong_epsilon(monkeypatch)
    torch._dynamo.reset()
    q, k, v = inputs()
    out = torch.compile(lambda q, k, v: hyper_attention(q, k, v), backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, hyper_attention(q, k, v, backend="reference"))
    wanted = torch.autograd.grad(hyper_attention(q, k, v, backend="reference").sum(), (q, k, v))
    for found, exact in zip(torch.autograd.grad(out.sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(found, exact)


def test_nothing_is_compared_while_a_cuda_graph_is_captured(compared, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(checked, "environment", lambda device: {"device": "simulated"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not checked.agrees(HYLA, device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not checked.agrees(HYLA, device) and compared == []  # what ran forward must also run backward
    new_process(monkeypatch)
    monkeypatch.setattr(checked, "compare", lambda kind, device: AGREES)
    assert checked.agrees(HYLA, device)


def test_the_comparison_takes_the_first_guess(monkeypatch):
    seen = []
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    for part in ("forward", "backward"):
        monkeypatch.setattr(gpu, part, lambda *tensors, **options: seen.append(tuning.may_measure()))
    assert "the output differs from the reference's by nan" in compare(HYLA, CPU)  # nothing was written
    assert seen == [False, False] and tuning.may_measure()
