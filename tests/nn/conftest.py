"""What the tests of fused blocks and of compiled decoding share."""

import math

import pytest
import torch

from headcode.nn import transformer as transformer_module
from headcode.nn.decoding import decode_compiled, decode_next
from headcode.nn.fused import run_fused


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fused(monkeypatch):
    """Whether each pass of a block so far was fused, in order."""
    passes = []

    def watched(*arguments):
        out = run_fused(*arguments)
        passes.append(out is not None)
        return out

    monkeypatch.setattr(transformer_module, "run_fused", watched)
    return passes


@pytest.fixture
def compiled(monkeypatch):
    """Whether each pass with a cache so far was one call of the decoding kernel, in order."""
    passes = []

    def watched(*arguments):
        logits = decode_compiled(*arguments)
        passes.append(logits is not None)
        return logits

    def watched_token(*arguments):
        logits = decode_next(*arguments)
        if logits is not None:  # else the model is called
            passes.append(True)
        return logits

    monkeypatch.setattr(transformer_module, "decode_compiled", watched)
    monkeypatch.setattr("headcode.nn.generation.decode_next", watched_token)
    return passes


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that torch does not fill holds NaN, so that a number which nobody wrote shows."""

    def poison(allocate):
        def allocated(*arguments, **options):
            made = allocate(*arguments, **options)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return allocated

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
