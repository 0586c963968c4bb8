"""Runs that fail: an experiment goes on without them and says so, and nothing is chosen or claimed by their absence."""

import json
import math

import pytest

from headcode.cli import main
from headcode.experiments import Mean, Study, _logic, _sraven, reproduce
from headcode.experiments.base import Experiment, Table, compare, per_seed
from headcode.experiments.run import finite
from headcode.presets import override, preset
from headcode.sweep import SilentDisplay, SweepFailed, grid

TINY = {"num_points": 5, "dim": 8, "num_layers": 1, "num_heads": 2, "qk_dim": 4, "v_dim": 4, "mlp_dim": 8}
SHORT = {"steps": 6, "batch_size": 4, "eval_every": 3, "eval_size": 16, "checkpoint_every": 0, "log_every": 3}
BASE = override(preset("logic"), **TINY, **SHORT, backend="reference")
TOO_MUCH = 1e30


class Diverging(Experiment):
    """Two rates, of which one is too high for anything."""

    name, title, question, claim, selection = "diverging", "Diverging", "A test?", "Nothing.", "None."
    rates = (1e-3, TOO_MUCH)

    def runs(self, scale):
        return grid(BASE, learning_rate=self.rates)

    def tables(self, study):
        return [Table("all", [{"rate": rate, "r2": study.mean("iid/r2", learning_rate=rate)} for rate in self.rates])]

    def verdicts(self, study):
        scores = [per_seed(study.rows, "iid/r2", learning_rate=rate) for rate in self.rates]
        return [compare("The low rate is better.", *scores)]

    def draw(self, study, stem):
        return []


class Hopeless(Diverging):
    name = "hopeless"
    rates = (TOO_MUCH,)


def test_an_experiment_goes_on_without_a_run_that_diverges(tmp_path):
    quiet = {"threads": 1, "display": SilentDisplay(), "say": lambda words: None}
    outcome = reproduce(Diverging(), "smoke", tmp_path, **quiet)
    assert [row["learning_rate"] for row in outcome.study.rows] == [1e-3]
    ((name, message),) = outcome.study.failed.items()
    assert name == "diverging: learning_rate=1e+30" and message.startswith("The loss is nan")
    found = json.loads((tmp_path / "diverging/smoke/findings.json").read_text())
    assert found["failed"] == {name: message}
    low, high = found["tables"][0]["rows"]
    assert math.isfinite(low["r2"]["value"]) and high["r2"] == {
        "value": None,
        "half_width": None,
        "count": 0,
        "each": [],
    }
    assert f"- **Failed, and left out**: {name}: " in (tmp_path / "diverging/smoke/findings.md").read_text()
    with pytest.raises(SweepFailed, match="1 of the sweep's runs failed: hopeless: learning_rate=1e"):
        reproduce(Hopeless(), "smoke", tmp_path, **quiet)


def test_the_command_makes_all_figures_that_it_can_and_ends_with_1(tmp_path, monkeypatch, capsys):
    experiments = {"hopeless": Hopeless(), "diverging": Diverging()}
    monkeypatch.setattr("headcode.cli.reproduce.EXPERIMENTS", tuple(experiments))
    monkeypatch.setattr("headcode.cli.reproduce.experiment", experiments.__getitem__)
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "all", "--out", str(tmp_path), "--threads", "1"])
    assert end.value.code == 1
    said = capsys.readouterr()
    assert "headcode: hopeless: learning_rate=1e+30 failed: " in said.err
    assert "headcode: diverging: learning_rate=1e+30 failed: " in said.err
    assert "[cannot tell] The low rate is better. no seed has both" in said.out
    assert (tmp_path / "diverging/smoke/findings.md").is_file()


def test_engines_get_their_options(tmp_path, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr("headcode.cli.reproduce.experiment", lambda name: Diverging())
    monkeypatch.setattr(
        "headcode.cli.reproduce.reproduce", lambda *arguments, **options: given.update(options) or 1 / 0
    )
    command = ["reproduce", "diverging", "--engine", "slurm", "--out", str(tmp_path)]
    with pytest.raises(ZeroDivisionError):
        main([*command, "--option", "partition=gpu", "--option", "num-gpus=1"])
    assert (given["partition"], given["num_gpus"], given["jobs"], given["threads"]) == ("gpu", 1, None, None)
    with pytest.raises(SystemExit) as end:
        main([*command, "--option", "jobs=2"])
    assert end.value.code == 2 and "The engine slurm has no option 'jobs'; use --jobs." in capsys.readouterr().err


@pytest.mark.parametrize(("module", "metric"), [(_logic, "r2"), (_sraven, "accuracy")])
def test_a_rate_at_which_runs_failed_is_not_chosen(module, metric, tmp_path):
    def row(rate, seed, score):
        return {"learning_rate": rate, "weight_decay": 0.1, "warmup_steps": 7, "seed": seed, f"iid/{metric}": score}

    without_a_score = [row(1e-3, 0, None), row(3e-3, 0, 0.5)]
    without_a_run = [row(1e-3, 0, 0.9), row(3e-3, 0, 0.5), row(3e-3, 1, 0.5)]
    for rows in (without_a_score, without_a_run):
        kept = module.select(Study("paper", rows, tmp_path), ())
        assert {row["learning_rate"] for row in kept} == {3e-3}


def test_nothing_is_claimed_from_the_seeds_that_are_left():
    better, worse = {0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.1, 1: 0.2, 2: 0.3}
    assert compare("s", better, worse).holds is True
    fewer = compare("s", better, {seed: worse[seed] for seed in (0, 1)})
    assert fewer.holds is None
    assert fewer.evidence.endswith("+0.400 (seed 1); only one of the two on seed 2")


def test_numbers_that_json_does_not_have():
    assert finite({"a": [math.nan, 1.5, {"b": math.inf}], "c": (1, "nan")}) == {
        "a": [None, 1.5, {"b": None}],
        "c": [1, "nan"],
    }
    assert finite(Mean.of([]).value) is None
