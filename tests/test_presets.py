"""The paper's settings, by the numbers, and single fields by their names."""

import pytest

from headcode.nn import Transformer
from headcode.presets import PRESETS, OptimizationConfig, RunConfig, fields_of, get_field, model_for, override, preset
from headcode.tasks import TASKS, FuzzyLogic


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_file(name):
    config = preset(name)
    assert RunConfig.from_json(config.to_json()) == config
    assert PRESETS[name].__doc__


def test_published_runs_have_the_authors_dropout():
    ours = ("sraven-fast", "lm-small", "lm-paper")
    published = [name for name in PRESETS if name.startswith(("logic", "sraven", "wikitext")) and name not in ours]
    assert {preset(name).model.attention_dropout for name in published} == {0.1}
    assert {preset(name).model.attention_dropout for name in ours} == {0.0}


def test_parameters_of_the_papers_models():
    def parameters(config):
        return sum(p.numel() for p in Transformer(config.model).parameters())

    assert parameters(override(preset("logic"), num_points=16)) == 151_009
    assert parameters(preset("sraven")) == 402_824


def test_the_defaults_of_the_command_line():
    logic, sraven = preset("logic"), preset("sraven")
    assert (logic.task.num_points, logic.task.held_out, logic.steps, logic.batch_size) == (32, 0.7, 8000, 128)
    assert sraven.steps * sraven.batch_size == 10_000_000 and sraven.model.num_layers == 4
    assert preset("logic-paper").steps == 50_000
    wide = preset("sraven-width-4").model
    assert (wide.dim, wide.num_heads, wide.qk_dim, wide.v_dim, wide.mlp_dim) == (512, 64, 256, 256, 1024)


def test_fields_are_found_wherever_they_stand():
    config = override(preset("logic"), num_points=13, method="softmax", learning_rate=0.25, steps=77, clip_norm=2)
    assert config.task.num_points == config.model.max_length == 13
    assert (config.model.method, config.optimization.learning_rate, config.steps) == ("softmax", 0.25, 77)
    assert config.optimization.clip_norm == 2.0
    for name in fields_of(config):
        assert override(config, **{name: get_field(config, name)}) == config or name == "seed"


def test_positions_repeat_row_by_row_whatever_the_puzzle():
    fast = preset("sraven-fast")
    assert fast.model.position_period == fast.task.period == 12
    assert override(fast, num_features=2).model.position_period == 6
    assert override(fast, num_features=2, grid=4).model.position_period == 8
    assert override(fast, num_features=2, position_period=3).model.position_period == 3
    assert override(fast, num_features=2, position_period=None).model.position_period is None


def test_hints_bring_their_heads():
    fast = preset("sraven-fast")
    assert fast.auxiliary_weight == 1.0 and fast.model.auxiliary_dims == (20, 64)
    assert override(fast, auxiliary_weight=0.0).model.auxiliary_dims == ()
    assert override(preset("sraven-small"), auxiliary_weight=0.5, num_layers=3).model.auxiliary_dims == (14, 16)
    model = model_for(fast.task, auxiliary_weight=1.0, num_layers=4)
    assert RunConfig(task=fast.task, model=model, auxiliary_weight=1.0).auxiliary_weight == 1.0
    with pytest.raises(ValueError, match=r"auxiliary_dims must be \(20, 64\), got \(\); make it with model_for"):
        RunConfig(task=fast.task, model=model_for(fast.task), auxiliary_weight=1.0)


def test_the_seed_is_everyones_unless_the_task_has_its_own():
    both = override(preset("logic"), seed=5)
    assert (both.seed, both.task.seed) == (5, 5)
    apart = override(preset("logic"), seed=5, task_seed=2)
    assert (apart.seed, apart.task.seed) == (5, 2)


def test_mistakes_are_sentences():
    with pytest.raises(
        ValueError, match=r"There is no preset 'paper'; did you mean 'lm-paper'\? The presets are: logic, logic-paper"
    ):
        preset("paper")
    with pytest.raises(
        ValueError, match=r"A logic run has no field 'num_values'; did you mean 'num_variables'\? It has: accumulate,"
    ):
        override(preset("logic"), num_values=3)
    with pytest.raises(ValueError, match="batch_size must be divisible by accumulate, got 128 and 3"):
        override(preset("logic"), accumulate=3)
    with pytest.raises(ValueError, match=f"must have a name out of {', '.join(TASKS)}, got 'chess'"):
        RunConfig.from_dict({**preset("logic").to_dict(), "task": {"name": "chess"}})
    with pytest.raises(ValueError, match="The model does not fit the task: max_length must be 32, got 16"):
        RunConfig(task=FuzzyLogic(), model=model_for(FuzzyLogic(num_points=16)))
    for changes in ({"steps": 0}, {"eval_size": -1}, {"ema_decay": 1.0}, {"clip_norm": 0}, {"seed": -1}, {"beta2": 1}):
        with pytest.raises(ValueError, match=r"must (be|lie)"):
            override(preset("logic"), **changes)
    with pytest.raises(ValueError, match="must be one of 'adamw', 'muon', got 'sgd'"):
        OptimizationConfig(optimizer="sgd")
