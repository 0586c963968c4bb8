"""Runs with a mixture of experts: exact to resume, balanced without dropping, and configured like any other."""

import json

import pytest
import torch

from headcode.cli import main
from headcode.nn import capture_routing
from headcode.presets import override, preset
from headcode.run import RunConfig
from headcode.sweep import config_hash
from headcode.train import Runtime, Trainer, TrainingInterrupted, read_metrics, task_loss
from headcode.train.distributed import Group
from headcode.train.learner import Learner
from tests.support.training import Interrupting, assert_same, small_config, train

EXPERTS = {"num_experts": 5, "experts_per_token": 2}


@pytest.mark.parametrize("extras", [{}, {"ema_decay": 0.9, "clip_norm": 0.5, "accumulate": 2, "optimizer": "muon"}])
def test_stopped_and_resumed_is_the_same_run(tmp_path, extras):
    config = small_config(**EXPERTS, **extras)
    train(config, tmp_path / "whole")
    for step in (4, 12):
        with pytest.raises(TrainingInterrupted):
            train(config, tmp_path / "broken", reporters=[Interrupting(step)])
    train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")


def shares(model, config):
    """Of the uses of experts in each layer, the shares of each, on fresh instances."""
    batch = config.task.sample("iid", 0, 200)
    with capture_routing(model) as routings, torch.no_grad():
        model(batch.x.to(next(model.parameters()).dtype))
    return [routing.experts.flatten().bincount(minlength=5) / routing.experts.numel() for routing in routings]


def test_the_balance_loss_keeps_all_experts_busy():
    """From a router that begins by sending every token to the same two experts."""

    def trained(weight):
        config = small_config(**EXPERTS, steps=150, learning_rate=1e-2, balance_weight=weight, eval_every=0)
        learner = Trainer(config, runtime=Runtime(device="cpu", threads=1))
        with torch.no_grad():
            for block in learner.learner.model.blocks:
                block.feedforward_norm.bias.fill_(0.5)
                block.feedforward.router.weight[:2] += 0.5
        return shares(learner.run().model, config)

    assert max(share.max().item() for share in trained(0.1)) < 0.35
    assert max(share.max().item() for share in trained(0.0)) > 0.45


def test_every_token_is_computed_by_its_experts():
    """Nothing is dropped, however unequal the uses are."""
    model = Learner(small_config(**EXPERTS), Runtime(device="cpu", threads=1)).model
    with torch.no_grad():
        for block in model.blocks:
            block.feedforward.router.weight.zero_()
            block.feedforward_norm.bias.fill_(1.0)
            block.feedforward.router.weight[:2] = 1.0
    assert all(
        torch.equal(share, torch.tensor([0.5, 0.5, 0, 0, 0])) for share in shares(model, small_config(**EXPERTS))
    )


def test_recorded_losses_are_the_tasks():
    """The first step's loss is that of the same weights, whatever the balance counts."""
    records = [train(small_config(**EXPERTS, steps=1, log_every=1, balance_weight=w)).metrics for w in (0.0, 7.0)]
    losses = [next(record["loss"] for record in found if record["kind"] == "train") for found in records]
    assert losses[0] == losses[1]


def test_a_loss_of_ones_own_is_balanced_too():
    """The router's gradient has the balance in it, whoever wrote the loss."""

    def gradient(weight):
        trainer = Trainer(
            small_config(**EXPERTS, balance_weight=weight),
            loss=lambda context: 0 * task_loss(context),
            runtime=Runtime(device="cpu", threads=1),
        )
        learner = trainer.learner
        learner.join(Group())
        learner.backward([trainer.config.task.sample("train", 0, 6)], 0)
        return learner.model.blocks[0].feedforward.router.weight.grad

    assert (gradient(0.0) == 0).all()
    assert torch.allclose(gradient(2.0), 2 * gradient(1.0)) and gradient(1.0).abs().sum() > 0


def test_new_fields_change_no_hash_and_old_files_are_read():
    config = preset("logic")
    assert config_hash(config) == "b1ebd09a392c"  # as before there were experts
    old = config.to_dict()
    for section, name in ((old["model"], "num_experts"), (old["model"], "experts_per_token"), (old, "balance_weight")):
        del section[name]
    assert RunConfig.from_dict(old) == config
    several = override(config, num_experts=4, experts_per_token=3, balance_weight=0.1)
    assert RunConfig.from_json(several.to_json()) == several
    assert len({config_hash(config), config_hash(several), config_hash(override(config, num_experts=4))}) == 3
    assert config_hash(override(config, num_experts=4)) == config_hash(override(config, num_experts=4, seed=0))


def test_from_the_command_line(tmp_path, capsys):
    run = tmp_path / "run"
    flags = (
        "--num-points 7 --dim 16 --num-heads 2 --mlp-dim 16 --steps 4 --batch-size 8 --eval-size 16 --backend reference"
    )
    main(
        [
            "train",
            "logic",
            *flags.split(),
            "--num-experts",
            "3",
            "--method",
            "linear",
            "--threads",
            "1",
            "--out",
            str(run),
        ]
    )
    capsys.readouterr()
    main(["eval", str(run), "--split", "compositional", "--size", "16", "--json"])
    assert json.loads(capsys.readouterr().out)["r2"] < 1
    assert read_metrics(run)[-1]["kind"] == "eval"
    main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert "num_experts" in (tmp_path / "page.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["train", "logic", "--num-experts", "3", "--experts-per-token", "4", "--out", str(tmp_path / "no")])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.err.count("\n") == 1
    assert "experts_per_token must lie in 2..3, the number of experts, got 4" in captured.err
