"""The Triton backend where nothing is interpreted: what it serves, what others get, tuning, and compilation."""

import functools
import logging
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import kernels
from headcode.ops import backends, explain_backend, hyper_attention
from headcode.ops.backends import choose_backend
from headcode.ops.options import AttentionInputs, AttentionOptions, Problem
from headcode.ops.triton import backend as gpu
from headcode.ops.triton import checked, tuning
from headcode.ops.triton.tuning import Tiles, fastest, first_guess

OPTIONS = AttentionOptions(
    causal=False,
    scale=0.5,
    norm="rms_head",
    value_net="relu",
    pooling="sum",
    dropout=0.0,
    dropout_seed=0,
    query_offset=0,
)
PROBLEM = Problem(
    batch=2,
    heads=3,
    queries=5,
    keys=5,
    qk_width=4,
    v_width=4,
    dtype=torch.float32,
    device="cuda",
    mask="none",
    bias=False,
    relative_bias=False,
    options=OPTIONS,
)


class Properties:
    name, major, minor = "NVIDIA A100", 8, 0


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """As on a machine with an A100, as far as the choice of a backend can see."""
    monkeypatch.setenv("HEADCODE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(checked, "_outcomes", {})
    monkeypatch.setattr(checked, "_warned", False)
    monkeypatch.setattr(checked, "environment", functools.cache(checked.environment.__wrapped__))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpu, "_HAS_TRITON", True)
    monkeypatch.setattr(gpu, "INTERPRETED", False)


def test_auto_takes_it_on_an_nvidia_gpu(nvidia):
    for norm in gpu.NORMS:
        for value_net in gpu.NETS:
            for dtype in gpu.DTYPES:
                options = replace(OPTIONS, norm=norm, value_net=value_net, pooling="mean")
                choice = choose_backend(
                    PROBLEM._replace(dtype=dtype, mask="dense", relative_bias=True, options=options)
                )
                assert choice.name == "triton" and choice.reason.startswith("fused kernel for cuda, if it agrees")


def test_auto_relies_on_it_only_where_it_agrees_with_the_reference(nvidia, monkeypatch, caplog, tmp_path):
    """`gpu_check_interpreted.py` has the comparison itself."""
    kind = checked.Kind("float32", 3, 4, 4, "rms_head", "relu", "sum", False, False, False, False)
    another_kind = PROBLEM._replace(options=replace(OPTIONS, causal=True))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for outcome in ("the output differs", checked.AGREES):
        monkeypatch.setattr(checked, "_outcomes", {})
        monkeypatch.setenv("HEADCODE_CACHE_DIR", str(tmp_path / f"after {outcome}"))
        monkeypatch.setattr(checked, "compare", lambda kind, device, outcome=outcome: outcome)
        assert checked.agrees(kind, device) is (outcome == checked.AGREES)
        choice = choose_backend(PROBLEM)
        if outcome == checked.AGREES:
            assert choice.name == "triton" and choice.reason.endswith("compared with the reference here, and agrees")
        else:
            assert choice.name == "chunked" and choice.rejected["triton"] == outcome
        assert choose_backend(another_kind).reason.endswith("at its first call here")
        assert "not compared" in choose_backend(PROBLEM, "triton").reason
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "on NVIDIA A100 (compute capability 8.0): the output differs. To report" in warning.getMessage()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options": replace(OPTIONS, norm="layer_head")}, "norms none, rms_head, softmax, not layer_head"),
        ({"options": replace(OPTIONS, value_net="swiglu")}, "not swiglu"),
        ({"options": replace(OPTIONS, pooling="max")}, "by sum, mean and sqrt, not by max"),
        ({"bias": True}, "relative band"),
        ({"dtype": torch.float64}, "float32, bfloat16 and float16, not float64"),
        ({"heads": 65}, "up to 64 heads, not 65"),
        ({"v_width": 129}, "up to 128 wide, not 129"),
    ],
)
def test_what_it_cannot_serve_goes_elsewhere_and_says_why(nvidia, changes, why):
    choice = choose_backend(PROBLEM._replace(**changes))
    assert choice.name == "reference" and why in choice.rejected["triton"]
    assert choose_backend(PROBLEM._replace(**changes, batch=2**20, queries=64, keys=64)).name == "chunked"
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call"):
        choose_backend(PROBLEM._replace(**changes), "triton")


def test_an_old_gpu_and_a_missing_triton_are_named(nvidia, monkeypatch):
    monkeypatch.setattr(Properties, "major", 7)
    monkeypatch.setattr(Properties, "minor", 5)
    assert gpu.unsupported(PROBLEM) == "it needs compute capability 8.0 or above, and this GPU has 7.5"
    monkeypatch.setattr(Properties, "major", 9)
    monkeypatch.setattr(gpu, "_HAS_TRITON", False)
    assert "pip install 'headcode[triton]'" in gpu.unsupported(PROBLEM)


def test_amd_and_apple_get_chunked_with_one_notice(monkeypatch, caplog):
    monkeypatch.setattr(backends, "_announced", set())
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with caplog.at_level(logging.WARNING, logger="headcode"):
        for device in ("mps", "cuda", "mps"):
            choice = choose_backend(PROBLEM._replace(device=device))
            assert choice.name == "chunked" and "NVIDIA" in choice.rejected["triton"]
    (notice,) = caplog.records
    assert notice.levelno == logging.WARNING
    assert notice.getMessage() == (
        "hyper_attention uses the chunked backend: the fused kernels are for CPUs and NVIDIA GPUs; this one serves any "
        "device with bounded memory"
    )


def test_chunked_serves_any_device():
    """By meaning on the CPU; on a device that computes nothing, by shape."""
    q, k, v = (torch.randn(2, 3, n, 4) for n in (5, 7, 7))
    band = torch.randn(3, 11)
    torch.testing.assert_close(
        hyper_attention(q, k, v, relative_bias=band, causal=True, backend="chunked"),
        hyper_attention(q, k, v, relative_bias=band, causal=True, backend="reference"),
    )
    elsewhere = [t.to("meta") for t in (q, k, v)]
    assert explain_backend(*elsewhere).name == "chunked"
    assert hyper_attention(*elsewhere).shape == (2, 3, 5, 4)


def test_on_a_cpu_it_is_refused_in_one_sentence():
    q = torch.randn(1, 2, 3, 2)
    with pytest.raises(ValueError, match="runs on NVIDIA GPUs, and the tensors are on cpu; use backend='auto'"):
        hyper_attention(q, q, q, backend="triton")


def test_importing_the_op_needs_neither_triton_nor_a_driver():
    code = (
        "import sys, headcode.ops, headcode.ops.triton.backend, headcode.bench.gpu\nassert 'triton' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )


def test_everything_but_the_kernels_works_where_triton_cannot_be_imported():
    code = """
import sys
sys.modules["triton"] = None  # every import of it fails, and it is found nowhere
import torch, headcode.cli
from headcode.ops import hyper_attention
from headcode.ops.triton import backend as gpu
q = torch.randn(2, 3, 5, 4, requires_grad=True)
wanted, *found = (
    torch.autograd.grad(hyper_attention(q, q, q, backend=backend).square().sum(), q)[0]
    for backend in ("reference", "auto", "chunked", "cpu")
)
for gradient in found:
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
assert not gpu._HAS_TRITON
try:
    headcode.cli.main(["bench", "kernels"])
except SystemExit as stop:
    assert stop.code == 2
print("served")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "served", done.stderr
    assert "headcode[triton]" in done.stderr and "Traceback" not in done.stderr


class CallOnAGpu:
    """As much of a call as the choice of tiles looks at."""

    q = torch.empty(1, device="meta")

    def kind(self):
        return (16, 64, "rms_head")


@pytest.fixture
def measured(monkeypatch):
    """Where tiles could be measured: which ones were."""
    found = []
    tiles = [Tiles(16, 16, 16, 16, warps) for warps in (4, 8)]
    monkeypatch.setattr(CallOnAGpu, "q", SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "first_guess", lambda call, kind: tiles[0])
    monkeypatch.setattr(tuning, "candidates", lambda call, kind: tiles)
    monkeypatch.setattr(tuning, "fastest", lambda given, launch: found.append(list(given)) or given[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    monkeypatch.delenv("HEADCODE_GPU_AUTOTUNE", raising=False)
    return found


def test_tiles_are_measured_at_the_first_launch_of_a_kind_and_kept(measured):
    chosen = [tuning.choose(CallOnAGpu(), kind, None).warps for kind in ("forward", "forward", "key")]
    assert chosen == [8, 8, 8] and len(measured) == 2


def test_the_deterministic_switch_takes_the_first_guess(measured, monkeypatch):
    """Even if other tiles were measured before."""
    assert tuning.choose(CallOnAGpu(), "forward", None).warps == 8
    torch.use_deterministic_algorithms(True)
    try:
        assert tuning.choose(CallOnAGpu(), "forward", None).warps == 4
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("HEADCODE_GPU_AUTOTUNE", "0")
    assert tuning.choose(CallOnAGpu(), "forward", None).warps == 4
    monkeypatch.delenv("HEADCODE_GPU_AUTOTUNE")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.choose(CallOnAGpu(), "key", None).warps == 4  # a launch that is recorded cannot be timed
    assert len(measured) == 1


def test_tf32_is_on_request_by_either_of_torchs_switches():
    """In a process of its own: the older switch cannot be read, or put back, after the newer one was used."""
    code = """
import torch
from headcode.ops.triton.tuning import float32_precision
found = [float32_precision()]
for precision in ("high", "medium", "highest"):
    torch.set_float32_matmul_precision(precision)
    found.append(float32_precision())
for allowed in (True, False):
    torch.backends.cuda.matmul.allow_tf32 = allowed
    found.append(float32_precision())
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    for precision in ("tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = precision
        assert float32_precision() == precision
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == ["ieee", "tf32", "tf32", "ieee", "tf32", "ieee"], done.stderr


@pytest.mark.triton
def test_tuning_takes_the_fastest_and_passes_over_what_does_not_fit():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from triton.runtime.errors import OutOfResources, PTXASError

    tiles = [Tiles(16, 16, 16, 16, warps) for warps in (1, 2, 4, 8, 16)]
    launched = []

    def launch(candidate):
        launched.append(candidate.warps)
        if candidate.warps == 1:
            raise OutOfResources(300_000, 160_000, "shared memory")
        if candidate.warps == 16:
            raise PTXASError("too many registers")

    def measure(run):
        run()
        return {2: 3.0, 4: 1.0, 8: 2.0}[launched[-1]]

    assert fastest(tiles, launch, measure).warps == 4 and launched == [1, 2, 4, 8, 16]
    assert fastest(tiles[:1], launch, measure) == tiles[0]


def test_the_first_guess_is_legal_for_all_sizes():
    """Powers of 2; on matrix units at least 16 on every side; diagonals of tiles are square."""
    from headcode.ops.triton.plan import TritonCall

    for heads in (1, 2, 3, 16, 17, 64):
        for width in (1, 4, 15, 16, 19, 128):
            for dtype in (torch.float32, torch.bfloat16):
                q = torch.empty(1, heads, 7, width, dtype=dtype, device="meta")
                call = TritonCall(AttentionInputs(q, q, q), OPTIONS, torch.empty(0))
                for kind in ("log_sums", "forward", "delta", "query", "key", "band"):
                    tiles = first_guess(call, kind)
                    numbers = (tiles.queries, tiles.keys, tiles.qk_chunk, tiles.v_chunk, tiles.warps)
                    assert all(number > 0 and number & (number - 1) == 0 for number in numbers)
                    if call.qk_wide:
                        assert min(numbers[:4]) >= 16 and call.padded_heads >= 16
                    assert kind != "band" or tiles.queries == tiles.keys


@pytest.mark.triton
def test_a_kernel_compiles_without_a_gpu():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    launch = kernels.launches(kernels.Variant(1, 2, "rms_head", "relu"))["forward"]
    compiled = kernels.compile_launch(launch, 80)
    assert 16 <= compiled.registers <= 255 and compiled.spilled == 0 and not compiled.matrix_units
    assert compiled.shared <= kernels.SHARED_LIMIT[80]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", kernels.CAPABILITIES)
def test_the_papers_shapes_compile_without_spills(capability):
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    shapes = [variant for variant in kernels.MAIN if variant.length < 512]
    assert [(variant.heads, variant.length, variant.width) for variant in shapes] == [(8, 96, 2), (16, 36, 4)]
    for variant in shapes:
        for kind, launch in kernels.launches(variant).items():
            compiled = kernels.compile_launch(launch, capability)
            assert compiled.spilled == 0, (variant, kind, compiled)
            assert compiled.shared <= kernels.SHARED_LIMIT[capability]


@pytest.mark.triton
@pytest.mark.slow
def test_half_precision_compiles_to_matrix_units():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    for kind, launch in kernels.launches(kernels.Variant(16, 64, "rms_head", "relu", "bfloat16")).items():
        compiled = kernels.compile_launch(launch, 90)
        assert compiled.matrix_units and compiled.shared <= kernels.SHARED_LIMIT[90], kind
