"""Which backend serves a call, why, and what is said about it."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from headcode.ops import backends, cpu, explain_backend, hyper_attention

q = torch.randn(2, 3, 5, 4)


def test_auto_takes_the_fused_kernel_where_it_can():
    choice = explain_backend(q, q, q)
    assert choice.name == "cpu" and choice.reason == "fused kernel for cpu"
    assert set(choice.rejected) == {"triton", "chunked", "reference"}
    padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    band = torch.zeros(3, 9)
    options = {"mask": padding, "relative_bias": band, "causal": True, "dropout": 0.1, "dropout_seed": 0}
    for norm in cpu.NORM_CODES:
        for value_net in cpu.NET_CODES:
            assert explain_backend(q, q, q, norm=norm, value_net=value_net, **options).name == "cpu"
    assert explain_backend(q.double(), q.double(), q.double()).name == "cpu"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"norm": "softmax_head"}, f"norms {', '.join(cpu.NORM_CODES)}, not softmax_head"),
        ({"value_net": "tanh"}, "not tanh"),
        ({"pooling": "max"}, "pools by sum, mean and sqrt, not by max"),
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "causal and per key"),
        ({"bias": torch.zeros(5, 5)}, "relative band"),
        ({"mask": torch.zeros(1, 5)}, "relative band"),
    ],
)
def test_what_it_cannot_serve_goes_elsewhere_and_forcing_it_says_why(options, why):
    choice = explain_backend(q, q, q, **options)
    assert choice.name == "reference" and why in choice.rejected["cpu"]
    assert f"not cpu: {choice.rejected['cpu']}" in str(choice)
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot serve this call: .*{why}.*use backend='auto'"):
        hyper_attention(q, q, q, backend="cpu", **options)


def test_half_precision_goes_elsewhere():
    half = q.bfloat16()
    assert explain_backend(half, half, half).name == "reference"
    with pytest.raises(ValueError, match="float32 and float64, not bfloat16"):
        hyper_attention(half, half, half, backend="cpu")


def test_softmax_of_wide_heads_is_torchs_and_says_so():
    wide = torch.randn(2, 3, 5, 32)
    options = {"norm": "softmax", "value_net": "linear"}
    assert "torch's own fused attention" in explain_backend(wide, wide, wide, **options).reason
    assert "torch" not in explain_backend(q, q, q, **options).reason
    with_band = explain_backend(wide, wide, wide, relative_bias=torch.zeros(3, 9), **options)
    assert with_band.reason == "fused kernel for cpu"


def test_a_big_call_that_is_not_fused_is_chunked():
    long = torch.randn(1, 16, 2048, 2)
    assert explain_backend(long, long, long, value_net="tanh").name == "chunked"
    assert explain_backend(long, long, long, backend="reference").name == "reference"


def test_the_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(backends, "_announced", set())
    with caplog.at_level(logging.INFO, logger="headcode"):
        for _ in range(3):
            hyper_attention(q, q, q)
    assert [record.getMessage() for record in caplog.records] == [
        "hyper_attention uses the cpu backend: fused kernel for cpu"
    ]


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be one of auto, chunked, cpu, reference, triton, got 'gpu'"):
        hyper_attention(q, q, q, backend="gpu")


WITHOUT_KERNELS = """
import sys, torch
if sys.argv[1] == "missing":
    sys.modules["numba"] = None
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find(name, *rest)
from headcode.ops import explain_backend, hyper_attention
q = torch.randn(2, 3, 5, 4)
choice = explain_backend(q, q, q)
assert choice.name == "reference", choice
print(choice.rejected["cpu"])
assert torch.equal(hyper_attention(q, q, q), hyper_attention(q, q, q, backend="reference"))
try:
    hyper_attention(q, q, q, backend="cpu")
except ValueError as error:
    print(error)
assert "numba" not in [name for name, module in sys.modules.items() if module is not None]
compiled = torch.compile(lambda q: hyper_attention(q, q, q), backend="aot_eager", fullgraph=True)
assert torch.allclose(compiled(q), hyper_attention(q, q, q))
"""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("disabled", "HEADCODE_DISABLE_NUMBA switches compiled kernels off"),
        ("missing", "it needs Numba, which is not installed (pip install numba)"),
    ],
)
def test_without_numba_the_others_serve(how, why):
    environment = {**os.environ, "HEADCODE_DISABLE_NUMBA": "1" if how == "disabled" else "0"}
    command = [sys.executable, "-c", WITHOUT_KERNELS, how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == why and second == f"backend 'cpu' cannot serve this call: {why}; use backend='auto'."


def test_importing_the_op_does_not_import_numba():
    code = "import sys, headcode.ops; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
