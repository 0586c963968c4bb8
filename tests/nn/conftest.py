"""What the tests of fused blocks share."""

import pytest
import torch

from headcode.nn import transformer as transformer_module
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
