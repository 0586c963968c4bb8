"""Which runs an experiment has: seeds, models of Table A1, what has records, and what it will cost."""

import pytest

from headcode.cli import main
from headcode.experiments import EXPERIMENTS, experiment, planned_runs
from headcode.experiments._table_a1 import TABLE_A1, with_models
from headcode.experiments.base import Experiment
from headcode.experiments.records import recorded_names
from headcode.experiments.run import estimate
from headcode.nn import forward_flops
from headcode.presets import override, preset
from headcode.sweep import config_hash, grid
from headcode.train import Runtime
from headcode.train.cost import run_flops, step_flops
from tests.support import ROOT

TINY = {"num_points": 5, "dim": 8, "num_layers": 1, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8}
BASE = override(preset("logic"), **TINY, steps=7, batch_size=3, eval_every=2, eval_size=11, backend="reference")


class Planned(Experiment):
    """Three seeds of one method, one of another, and a run whose task has a seed of its own."""

    name, title, question, claim, selection = "planned", "Planned", "A test?", "Nothing.", "None."
    tables = verdicts = draw = None

    def runs(self, scale):
        yield from grid(BASE, seed=range(3), method=("hyla",))
        yield from grid(BASE, method=("softmax",))
        yield "own", override(BASE, method="linear", task_seed=5)


Planned.__abstractmethods__ = frozenset()


def seeds_by_method(seeds):
    found = {}
    for _, config in planned_runs(Planned(), "smoke", seeds):
        found.setdefault(config.model.method, []).append((config.seed, config.task.seed))
    return found


def test_every_setting_gets_as_many_seeds_as_asked_for():
    assert seeds_by_method(None) == {"hyla": [(0, 0), (1, 1), (2, 2)], "softmax": [(0, 0)], "linear": [(0, 5)]}
    assert seeds_by_method(1) == {"hyla": [(0, 0)], "softmax": [(0, 0)], "linear": [(0, 5)]}
    both = [(0, 0), (1, 1)]
    assert seeds_by_method(2) == {"hyla": both, "softmax": both, "linear": [(0, 5), (1, 5)]}
    assert len(seeds_by_method(5)["hyla"]) == 5


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_every_held_out_share_can_be_drawn_for_more_seeds(scale):
    """With few combinations on one side, hardly any division has all rules on both."""
    shares = {config.task.held_out for _, config in planned_runs(experiment("sraven-held-out"), scale, 8)}
    assert len(shares) == 5


def test_names_of_runs_tell_their_seed():
    names = [name for name, _ in planned_runs(Planned(), "smoke", 2)]
    first = ["seed=0,method=hyla", "method=softmax", "own"]
    assert names == [
        f"planned: {name}" for name in [*first, "seed=1,method=hyla", "method=softmax,seed=1", "own,seed=1"]
    ]
    with pytest.raises(ValueError, match="seeds must be 1 or more, got 0"):
        planned_runs(Planned(), "smoke", 0)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "language" and experiment(name).trains])
def test_as_many_seeds_as_it_has_change_no_run(name):
    own = planned_runs(experiment(name), "smoke")
    count = len({config.seed for _, config in own})
    asked = planned_runs(experiment(name), "smoke", count)
    assert {config_hash(config) for _, config in own} <= {config_hash(config) for _, config in asked}
    assert len({run for run, _ in asked}) == len(asked)


def test_a_run_costs_its_steps_and_its_evaluations():
    """Seven steps, evaluated after 2, 4, 6 and 7, on 11 instances of three splits; a step is three forward passes."""
    forward = step_flops(BASE) // (3 * 3)
    assert run_flops(BASE) == 7 * step_flops(BASE) + 4 * 3 * 11 * forward
    assert run_flops(override(BASE, eval_every=0)) == 7 * step_flops(BASE) + 3 * 11 * forward
    assert run_flops(override(BASE, eval_size=0)) == 7 * step_flops(BASE)


def test_the_cost_of_an_experiment_is_that_of_its_runs(monkeypatch):
    monkeypatch.setattr("headcode.experiments.run.PROBE_SECONDS", 0.01)
    configs = [BASE, override(BASE, steps=5)]
    cost = estimate(configs, Runtime(threads=1))
    assert (cost.runs, cost.steps, cost.instances, cost.flops) == (2, 12, 36, sum(map(run_flops, configs)))
    assert cost.seconds > 0 and "2 runs, 12 steps, 36 training instances, " in str(cost) and "a probe of" in str(cost)
    assert str(estimate([], Runtime(threads=1))) == "nothing, there are no runs"


def test_a_dry_run_says_which_runs_have_records(capsys):
    main(["reproduce", "heads", "--scale", "laptop", "--kept", str(ROOT / "docs/results/records"), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert "Cost: nothing, there are no runs." in lines
    assert sum(line.endswith(" (has a record)") for line in lines) == 15
    assert any(line.startswith("15 of 15 runs have records in ") for line in lines)


def test_a_dry_run_of_the_papers_language_models_needs_no_text(capsys):
    main(["reproduce", "language", "--scale", "paper", "--dry-run"])
    said = capsys.readouterr().out
    assert "of a plain matrix product on this CPU, which no run reaches" in said
    assert said.count("language: ") == len(planned_runs(experiment("language"), "paper", dry=True)) > 3


@pytest.mark.parametrize(
    "name", ["logic-generalisation", "logic-ablation", "heads", "sraven-scaling", "sraven-ablation"]
)
def test_laptop_runs_have_their_records(name):
    """The runs that the repository keeps are found by what the experiments ask for today."""
    pairs = planned_runs(experiment(name), "laptop")
    eight = {"softmax", "linear", "linear_rms", "hyla", "hyla_unnormed", "softmax_hyla"}
    eight |= {"hyla_deep_linear", "hyla_deep_linear_unnormed"}
    asked = {run for run, config in pairs if config.model.method in eight and config.model.num_experts == 1}
    assert asked <= recorded_names(pairs, ROOT / "docs/results/records") and len(asked) >= 9


def test_rows_know_their_model():
    rows = [{"seed": seed, **model.fields} for seed, model in enumerate(TABLE_A1.values())]
    named = with_models(rows)
    assert [row["model"] for row in named] == list(TABLE_A1)
    assert [{**row, "model": name} for row, name in zip(rows, TABLE_A1, strict=True)] == named
    assert len({tuple(sorted(model.fields.items())) for model in TABLE_A1.values()}) == len(TABLE_A1)


def test_a_token_costs_with_experts_what_it_costs_without_them():
    """But for the router: 8 scores of 128 numbers for each of 32 tokens, in 2 layers (sizes: docs/protocol.md)."""
    base = preset("logic-paper")
    for method in ("softmax", "linear", "hyla"):
        plain, mixed = (TABLE_A1[name].run(base).model for name in (method, f"{method}_experts"))
        assert (mixed.num_experts, mixed.experts_per_token, mixed.mlp_dim) == (8, 2, 128)
        assert mixed.replace(num_experts=1, mlp_dim=256) == plain
        assert forward_flops(mixed, 32) - forward_flops(plain, 32) == 2 * 8 * 128 * 32 * 2
