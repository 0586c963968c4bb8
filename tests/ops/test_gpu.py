"""The Triton backend where nothing is interpreted: what it serves, what others get, tuning, and compilation."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from headcode.bench import kernels
from headcode.ops import backends, explain_backend, gpu, hyper_attention
from headcode.ops._gpu_tuning import Tiles, fastest, first_guess
from headcode.ops.backends import Problem, choose_backend

PROBLEM = Problem(
    batch=2,
    heads=3,
    queries=5,
    keys=5,
    qk_width=4,
    v_width=4,
    dtype=torch.float32,
    device="cuda",
    norm="rms_head",
    value_net="relu",
    pooling="sum",
    mask="none",
    dense_bias=False,
    relative_bias=False,
    causal=False,
    dropout=False,
    aligned=True,
    needs_grad=True,
)


class Properties:
    major, minor = 8, 0


@pytest.fixture
def nvidia(monkeypatch):
    """As on a machine with an A100, as far as the choice of a backend can see."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpu, "_HAS_TRITON", True)
    monkeypatch.setattr(gpu, "INTERPRETED", False)


def test_auto_takes_it_on_an_nvidia_gpu(nvidia):
    for norm in gpu.NORMS:
        for value_net in gpu.NETS:
            for dtype in gpu.DTYPES:
                choice = choose_backend(
                    PROBLEM._replace(
                        norm=norm, value_net=value_net, dtype=dtype, mask="dense", pooling="mean", relative_bias=True
                    )
                )
                assert choice.name == "triton" and choice.reason == "fused kernel for cuda"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norm": "layer_head"}, "norms none, rms_head, softmax, not layer_head"),
        ({"value_net": "swiglu"}, "not swiglu"),
        ({"pooling": "max"}, "by sum and mean, not by max"),
        ({"dense_bias": True}, "relative band"),
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
        "import sys, headcode.ops, headcode.ops.gpu, headcode.bench.gpu, headcode.bench.kernels\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )


def test_tuning_takes_the_fastest_and_passes_over_what_does_not_fit():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    from triton.runtime.errors import OutOfResources

    tiles = [Tiles(16, 16, 16, 16, warps) for warps in (1, 2, 4, 8)]
    launched = []

    def launch(candidate):
        launched.append(candidate.warps)
        if candidate.warps == 1:
            raise OutOfResources(300_000, 160_000, "shared memory")

    def measure(run):
        run()
        return {2: 3.0, 4: 1.0, 8: 2.0}[launched[-1]]

    assert fastest(tiles, launch, measure).warps == 4 and launched == [1, 2, 4, 8]
    assert fastest(tiles[:1], launch, measure) == tiles[0]


def test_the_first_guess_is_legal_for_all_sizes():
    """Powers of 2; on matrix units at least 16 on every side; diagonals of tiles are square."""
    from headcode.ops._gpu_plan import GpuCall

    for heads in (1, 2, 3, 16, 17, 64):
        for width in (1, 4, 15, 16, 19, 128):
            for dtype in (torch.float32, torch.bfloat16):
                q = torch.empty(1, heads, 7, width, dtype=dtype, device="meta")
                options = {"norm": "rms_head", "value_net": "relu", "dropout": 0.0, "causal": False}
                call = GpuCall(q, q, q, None, None, torch.empty(0), options)
                for kind in ("log_sums", "forward", "delta", "query", "key", "band"):
                    tiles = first_guess(call, kind)
                    numbers = (tiles.queries, tiles.keys, tiles.qk_chunk, tiles.v_chunk, tiles.warps)
                    assert all(number > 0 and number & (number - 1) == 0 for number in numbers)
                    if call.qk_wide:
                        assert min(numbers[:4]) >= 16 and call.padded_heads >= 16
                    assert kind != "band" or tiles.queries == tiles.keys


def test_a_kernel_compiles_without_a_gpu():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    launch = kernels.launches(kernels.Variant(1, 2, "rms_head", "relu"))["forward"]
    compiled = kernels.compile_launch(launch, 80)
    assert 16 <= compiled.registers <= 255 and compiled.spilled == 0 and not compiled.matrix_units
    assert compiled.shared <= kernels.SHARED_LIMIT[80]


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


@pytest.mark.slow
def test_half_precision_compiles_to_matrix_units():
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    for kind, launch in kernels.launches(kernels.Variant(16, 64, "rms_head", "relu", "bfloat16")).items():
        compiled = kernels.compile_launch(launch, 90)
        assert compiled.matrix_units and compiled.shared <= kernels.SHARED_LIMIT[90], kind
