"""Runs that fail: an experiment goes on without them and says so, and nothing is chosen or claimed by their absence."""

import json
import math
import subprocess
import sys

import pytest

from headcode.cli import main
from headcode.experiments import Mean, Study, _logic, _sraven, experiment, planned_runs, reproduce
from headcode.experiments.base import Experiment, Table, compare, finite
from headcode.experiments.mean import per_seed
from headcode.files import to_json
from headcode.presets import fields_of, get_field, override, preset
from headcode.sweep import SilentDisplay, SweepFailed, grid
from tests.support import ROOT

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
    assert "[inconclusive] The low rate is better. no seed has both" in said.out
    assert (tmp_path / "diverging/smoke/findings.md").is_file()


def test_who_closes_the_output_still_gets_the_files_and_the_exit_code(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import headcode.cli.reproduce as r, tests.experiments.test_failed_runs as t\n"
        "r.experiment = lambda name: t.Diverging()\n"
        "t.main(['reproduce', 'diverging', '--threads', '1', '--out', sys.argv[2]])"
    )
    words = [sys.executable, "-c", script, str(ROOT), str(tmp_path)]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    command.stdout.close()
    assert command.wait(120) == 1
    assert (tmp_path / "diverging/smoke/findings.md").is_file()


def study_of(name, folder, keep):
    """Made-up results of an experiment's runs, of those that `keep` takes."""
    configs = [config for _, config in planned_runs(experiment(name), "smoke") if keep(config)]
    rows = []
    for number, config in enumerate(configs):
        run = folder / "runs" / str(number)
        run.mkdir(parents=True)
        (run / "config.json").write_bytes(to_json(config.to_dict()))
        metrics = {"loss": 0.1, "r2": 0.5 + number / 100, "accuracy": 0.5, "feature_accuracy": 0.7}
        splits = ("iid", "compositional", "novel")
        records = [{"kind": "train", "step": 10, "loss": 0.3}]
        # In the first run a score is missing on the way, as where it was not finite.
        early = metrics if number else metrics | {"r2": None}
        records += [{"kind": "eval", "step": 10, "split": split, **early} for split in splits]
        records += [{"kind": "train", "step": 20, "loss": 0.2 - number / 1000}]
        records += [{"kind": "eval", "step": 20, "split": split, **metrics} for split in splits]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {field: get_field(config, field) for field in fields_of(config)}
        scores = {f"{split}/{metric}": value for split in splits for metric, value in metrics.items()}
        known = {"name": f"{name}: {number}", "folder": str(run), "task": config.task.name, "train/loss": 0.2}
        rows.append({**fields, **scores, **known})
    return Study("smoke", rows, folder)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("cross-attention", lambda config: config.task.name == "logic"),
        ("cross-attention", lambda config: config.task.name == "sraven"),
        ("cross-attention", lambda config: config.model.cross_layers == 0),
        ("capacity", lambda config: config.model.method == "hyla_unnormed" and config.seed == 0),
        ("capacity", lambda config: config.seed == 0),
    ],
)
def test_whole_groups_of_runs_may_be_missing(name, keep, tmp_path):
    study = study_of(name, tmp_path, keep)
    found = experiment(name)
    found.analyse(study, lambda words: None)
    # One seed a run, so whatever is left, nothing is told from it.
    assert found.tables(study)
    assert {verdict.word for verdict in found.verdicts(study)} == {"inconclusive"}
    assert all(path.stat().st_size > 100 for path in found.draw(study, tmp_path / name))


def test_engines_get_their_options(tmp_path, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr("headcode.cli.reproduce.experiment", lambda name: Diverging())

    def note(experiment, scale, out, *, seeds, **options):
        given.update(options)
        raise ZeroDivisionError

    monkeypatch.setattr("headcode.cli.reproduce.reproduce", note)
    command = ["reproduce", "diverging", "--engine", "slurm", "--out", str(tmp_path)]
    with pytest.raises(ZeroDivisionError):
        main([*command, "--option", "partition=gpu", "--option", "num-gpus=1"])
    assert (given["partition"], given["num_gpus"], given["jobs"], given["threads"]) == ("gpu", 1, None, None)
    for option, instead in (("jobs=2", "use --jobs."), ("seeds=1", "see docs"), ("allow-failures=true", "see docs")):
        with pytest.raises(SystemExit) as end:
            main([*command, "--option", option])
        name = option.partition("=")[0].replace("-", "_")
        said = capsys.readouterr().err
        assert end.value.code == 2 and f"The engine slurm has no option '{name}'; {instead}" in said


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
