"""What torch thinks of the registered ops: opcheck, compilation, memory."""

import shutil
import subprocess
import sys

import pytest
import torch

from headcode.ops import NORMS, POOLINGS, VALUE_NETS, hyper_attention
from headcode.ops.registration import registered as forward_op
from headcode.ops.registration import registered_backward as backward_op

COMPILERS = ["aot_eager", "inductor"] if shutil.which("g++") or shutil.which("clang++") else ["aot_eager"]


def arguments(norm="rms_head", value_net="relu", pooling="sum", window=None, requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 4)]
    tensors += [torch.randn(2, 1, 1, 7) > -1, torch.randn(1, 3, 5, 1), torch.randn(3, 11)]
    tensors = [t.requires_grad_(requires_grad) if t.is_floating_point() else t for t in tensors]
    middle = torch.randn(3, 4, 5, requires_grad=requires_grad) if VALUE_NETS[value_net].middle else None
    tensors.append(middle)
    return (*tensors, True, 0.5, norm, value_net, pooling, 0.1, 12345, 2, window, "chunked")


@pytest.mark.parametrize(
    ("norm", "value_net", "pooling", "window"),
    [(norm, "relu", "sum", None) for norm in NORMS]
    + [("rms_head", name, "sum", None) for name, net in VALUE_NETS.items() if net.on_values is None]
    + [("softmax", "linear", pooling, None) for pooling in POOLINGS]
    + [("rms_head", "relu_relu", "sqrt", 3)],
)
def test_opcheck(norm, value_net, pooling, window):
    torch.library.opcheck(forward_op, arguments(norm, value_net, pooling, window))
    plain = arguments(norm, value_net, pooling, window, requires_grad=False)
    out, saved = forward_op(*plain)
    torch.library.opcheck(backward_op, (torch.randn_like(out), *plain, out, saved, True, True, True))
    torch.library.opcheck(backward_op, (torch.randn_like(out), *plain, out, saved, False, False, False))


def check_compiled(backend, compiler, seeds):
    """Output and gradients of a compiled call, whose seed may change, are those of the eager one."""
    torch._dynamo.reset()

    def function(q, k, v, band, seed):
        return hyper_attention(
            q, k, v, relative_bias=band, causal=True, dropout=0.2, dropout_seed=seed, backend=backend
        ).sin()

    compiled = torch.compile(function, backend=compiler, fullgraph=True)
    for seed in seeds:
        torch.manual_seed(seed % 97)
        inputs = [torch.randn(2, 3, 5, 2), torch.randn(2, 3, 7, 2), torch.randn(2, 3, 7, 4), torch.randn(3, 11)]
        inputs = [t.requires_grad_() for t in inputs]
        eager, traced = function(*inputs, seed), compiled(*inputs, seed)
        torch.testing.assert_close(traced, eager)
        expected = torch.autograd.grad(eager.sum(), inputs)
        for actual, wanted in zip(torch.autograd.grad(traced.sum(), inputs), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu", "auto"])
def test_compiled_equals_eager(compiler, backend):
    check_compiled(backend, compiler, seeds=(1, 2, 2**61))


MEMORY_PROBE = """
import resource, sys, torch
from headcode.ops import hyper_attention
torch.set_num_threads(1)
def step(length):
    q, k, v = (torch.randn(1, 2, length, 2, requires_grad=True) for _ in range(3))
    hyper_attention(q, k, v, backend=sys.argv[1]).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(4096)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_chunked_needs_a_tenth_of_the_memory_at_4096():
    peak = {}
    for backend in ("reference", "chunked"):
        command = [sys.executable, "-c", MEMORY_PROBE, backend]
        peak[backend] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak["chunked"] * 10 <= peak["reference"], peak


def test_the_dropout_mask_is_an_op_too():
    torch.library.opcheck(torch.ops.headcode.dropout_keep_mask, (0.3, 7, 3, 5, 2), {"device": torch.device("cpu")})


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_every_size_may_be_dynamic(backend):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, scale: hyper_attention(q, k, v, scale=scale, backend=backend),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for batch, heads, queries, keys, width, scale in [
        (2, 3, 5, 7, 4, None),
        (3, 2, 7, 5, 6, 0.5),
        (1, 5, 2, 3, 2, 0.6),
    ]:
        q, k, v = (torch.randn(batch, heads, n, width) for n in (queries, keys, keys))
        torch.testing.assert_close(compiled(q, k, v, scale), hyper_attention(q, k, v, scale=scale, backend=backend))


def test_other_derivatives_are_right_or_refused():
    q, k, v = (torch.randn(1, 2, 3, 2, dtype=torch.float64) for _ in range(3))
    tangent = torch.randn_like(q)
    _, exact = torch.func.jvp(lambda q: hyper_attention(q, k, v, backend="reference"), (q,), (tangent,))
    _, auto = torch.func.jvp(lambda q: hyper_attention(q, k, v), (q,), (tangent,))
    torch.testing.assert_close(auto, exact)
    assert exact.abs().max() > 0
    with pytest.raises(ValueError, match="no forward-mode derivative; use backend='reference'"):
        torch.func.jvp(lambda q: hyper_attention(q, k, v, backend="chunked"), (q,), (tangent,))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(hyper_attention(q, k, v, backend="chunked").sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='reference'"):
        grad.sum().backward()
