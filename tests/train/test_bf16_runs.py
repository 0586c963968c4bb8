"""Runs with precision="bf16" on a CPU."""

import pytest
import torch

from headcode.ops.cpu import block as block_module
from headcode.train import TrainingInterrupted
from headcode.train import runtime as runtime_module
from headcode.train.evaluate import evaluate_model
from tests.support.bf16 import needs_bf16
from tests.support.training import Interrupting, assert_same, small_config, train


def test_bf16_needs_a_processor_for_it_and_says_so(monkeypatch):
    monkeypatch.setattr(runtime_module, "why_no_bf16", lambda: "the processor has no avx512_bf16")
    with pytest.raises(ValueError, match="precision 'bf16' on a CPU needs .* the processor has no avx512_bf16; use "):
        train(small_config(precision="bf16"))


FUSED = {"backend": "auto", "dim": 16, "num_heads": 2, "qk_dim": 16, "v_dim": 16, "mlp_dim": 32}


@needs_bf16
def test_a_bf16_run_resumes_exactly_and_is_evaluated_as_it_was_trained(tmp_path, monkeypatch):
    """Its blocks are fused; evaluated again from its files, it has the metrics that training wrote."""
    products, project = [], block_module.plan_block
    monkeypatch.setattr(block_module, "plan_block", lambda sizes: products.append(sizes.products) or project(sizes))
    config = small_config(precision="bf16", **FUSED)
    whole = train(config, tmp_path / "whole")
    assert set(products) == {"bf16"}
    with pytest.raises(TrainingInterrupted):
        train(config, tmp_path / "broken", reporters=[Interrupting(13)])
    train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")
    sizes = {"size": config.eval_size, "batch_size": config.eval_batch_size, "device": torch.device("cpu")}
    again = evaluate_model(whole.model, config, ["iid"], **sizes)["iid"]
    recorded = [r for r in whole.metrics if r["kind"] == "eval" and r["split"] == "iid"][-1]
    assert again == {name: recorded[name] for name in again}
    assert train(small_config(**FUSED)).metrics != whole.metrics
