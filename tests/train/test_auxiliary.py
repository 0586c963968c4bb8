"""Auxiliary targets: further heads that predict what a task knows about the tokens of training instances."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import headcode
from headcode.presets import override, preset
from headcode.train import Trainer, TrainingInterrupted, auxiliary_loss, prediction_loss, task_loss
from tests.support.training import Interrupting, assert_same, small_config, train


def auxiliary_config(**changes):
    sizes = {name: getattr(small_config().model, name) for name in ("dim", "num_heads", "qk_dim", "v_dim", "mlp_dim")}
    return override(
        preset("sraven-small"),
        permute=True,
        auxiliary_weight=0.5,
        num_layers=3,
        steps=20,
        batch_size=6,
        **sizes,
        **changes,
    )


def test_hints_count_in_the_loss_by_their_weight():
    found = []

    def spy(context):
        outputs, (late, early) = context.predict(auxiliary=True)
        rule, places, sums = context.task.auxiliary_targets(context.batch)
        whole = [4, 5, 10, 11]  # the last panels of the first two rows
        rule_loss = cross_entropy(late[..., :8].flatten(0, 1), rule.flatten())
        place_loss = sum(
            cross_entropy(late[..., 8 + 2 * n : 10 + 2 * n].flatten(0, 1), places[..., n].flatten()) / 3
            for n in range(3)
        )
        sum_loss = sum(
            cross_entropy(early[:, whole, 2 * n : 2 * n + 2].flatten(0, 1), sums[:, whole, n].flatten()) / 8
            for n in range(8)
        )
        plain = prediction_loss(context.task, outputs, context.batch.y)
        found.append((task_loss(context).item(), (plain + 0.5 * (rule_loss + place_loss + 8 * sum_loss)).item()))
        return task_loss(context)

    Trainer(auxiliary_config(), loss=spy).run()
    assert len(found) == 20
    for actual, expected in found:
        assert actual == pytest.approx(expected, rel=1e-6)


def test_runs_with_hints_resume(tmp_path):
    config = auxiliary_config(eval_size=16, checkpoint_every=6)
    train(config, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        train(config, tmp_path / "broken", reporters=[Interrupting(9)])
    train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")
    model = headcode.load(tmp_path / "whole")
    assert model.config.auxiliary_dims == (8 + 3 * 2, 2 * 2 * 2**2)


def test_hints_are_learned():
    config = auxiliary_config(learning_rate=1e-2, warmup_steps=5, eval_size=0).replace(steps=150)
    batch = config.task.sample("train", 1000, 200)

    def loss_of(model):
        with torch.no_grad():
            return auxiliary_loss(config.task, model(batch.x, auxiliary=True)[1], batch).item()

    start = loss_of(Trainer(config).model)
    assert loss_of(train(config).model) < 0.8 * start


def test_a_loss_that_forgets_the_hints_is_refused():
    with pytest.raises(ValueError, match="leaves out the run's auxiliary targets"):
        Trainer(auxiliary_config(), loss=lambda context: context.predict().square().mean()).run()


def test_hints_of_a_task_that_has_none_are_refused():
    with pytest.raises(ValueError, match=r"The task logic has no auxiliary targets: use auxiliary_weight=0, got 1\.0"):
        small_config(auxiliary_weight=1.0)
    with pytest.raises(ValueError, match="auxiliary_weight must be 0 or more, got -1"):
        auxiliary_config().replace(auxiliary_weight=-1.0)
