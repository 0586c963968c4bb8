"""Every experiment, from its runs to its figure, at smoke scale; and what the experiments compute, by hand."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from headcode.experiments import EXPERIMENTS, Mean, Study, _logic, _sraven, experiment, planned_runs, reproduce
from headcode.experiments.base import compare
from headcode.experiments.capacity import score_at_loss, widened_to
from headcode.experiments.mean import judge
from headcode.presets import override, preset
from headcode.sweep import SilentDisplay, config_hash
from headcode.tasks import SRaven
from headcode.train.cost import step_flops

CHEAPEST = "sraven-ablation"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder, so that experiments share their runs as they do for a user."""
    return tmp_path_factory.mktemp("experiments")


def numbers_in(row):
    """The numbers of a table's row in findings.json; a mean over seeds counts as its value."""
    values = [cell["value"] if isinstance(cell, dict) else cell for cell in row.values()]
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


@contextmanager
def looking_at_figures():
    """The figures that are written meanwhile."""
    seen = []
    write = Figure.savefig

    def look(figure, path, **options):
        write(figure, path, **options)
        seen.append(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", look)
        yield seen


def inside(limits, values):
    low, high = sorted(limits)
    return [low <= value <= high for value in values if math.isfinite(value)]


def share_of_data_inside(axes):
    """How much of the labelled lines and of the bars of a panel lies within its range; None if it has no such data."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    found = []
    for line in lines:
        if line.get_transform() != axes.get_yaxis_transform():  # that of a level across the panel
            found += inside(axes.get_xlim(), line.get_xdata())
        found += inside(axes.get_ylim(), line.get_ydata())
    for bar in axes.patches:
        found += inside(axes.get_ylim(), [bar.get_y() + bar.get_height()])
        found += inside(axes.get_xlim(), [bar.get_x() + bar.get_width()])
    return sum(found) / len(found) if found else None


def check(name, out):
    with looking_at_figures() as figures:
        outcome = reproduce(experiment(name), "smoke", out, threads=1, display=SilentDisplay(), say=lambda words: None)
    shares = [share_of_data_inside(panel) for panel in figures[0].axes]
    assert all(share in (None, 1.0) for share in shares), shares
    assert any(share is not None for share in shares) or figures[0].axes[0].images, "no data"
    folder = out / name / "smoke"
    assert {path.suffix for path in outcome.files} >= {".csv", ".json", ".md", ".svg", ".png"}
    for path in outcome.files:
        assert path.parent == folder
        assert path.stat().st_size > 100, path
    picture = imread(folder / f"{name}.png")[..., :3]
    inked = (picture < 0.98).any(-1).mean()
    assert 0.005 < inked < 0.9, "a blank figure, or a black one"
    found = json.loads((folder / "findings.json").read_text(encoding="utf-8"))
    assert (found["experiment"], found["scale"]) == (name, "smoke")
    assert found["runs"] == len(planned_runs(experiment(name), "smoke"))
    assert found["selection"]
    assert found["verdicts"]
    assert {verdict["word"] for verdict in found["verdicts"]} <= {"supports", "disagrees", "inconclusive"}
    if len(found["seeds"]) < 2 and experiment(name).trains:
        # What holds exactly, and what an analysis trains itself on several seeds, does not hang on the runs' seeds.
        claims = {v["statement"] for v in found["verdicts"] if v["holds"] is not None}
        assert all("One layer of linear attention" in claim or claim.startswith("Trained") for claim in claims)
    assert found["tables"]
    for table in found["tables"]:
        assert table["rows"], table["title"]
        for row in table["rows"]:
            assert any(math.isfinite(value) for value in numbers_in(row)), (table["title"], row)
    check_without_a_run(experiment(name), outcome.study)
    return found


def check_without_a_run(found, study):
    """Tables, verdicts and figure when the first run failed."""
    if len(study.rows) < 2:
        return
    folder = study.folder / "without"
    folder.mkdir()
    fewer = Study(study.scale, study.rows[1:], folder, study.threads)
    found.analyse(fewer, lambda words: None)
    assert found.tables(fewer) and found.verdicts(fewer)
    assert all(path.stat().st_size > 100 for path in found.draw(fewer, folder / found.name))


def test_the_cheapest_at_smoke_scale(out):
    found = check(CHEAPEST, out)
    (table,) = found["tables"]
    assert [row["model"] for row in table["rows"]] == [
        "softmax",
        "linear_rms",
        "hyla",
        "hyla_deep_linear",
        "oracle (ceiling)",
    ]
    ceiling = table["rows"][-1]
    assert 0.9 < ceiling["compositional"] <= 1.0
    for row in table["rows"][:-1]:
        assert 0 <= row["compositional"]["value"] <= row["compositional, per feature"]["value"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != CHEAPEST])
def test_every_experiment_at_smoke_scale(name, out):
    check(name, out)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_names_and_words(name):
    found = experiment(name)
    assert found.name == name
    for words in (found.title, found.question, found.claim, found.selection):
        assert len(words) > 10


def test_compare_seed_by_seed():
    assert compare("s", {0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}).holds is True
    assert compare("s", {0: 0.5, 1: 0.25}, {0: 0.75, 1: 0.5}).holds is False
    mixed = compare("s", {0: 0.5, 1: 0.75, 2: 0.5, 9: 1.0}, {0: 0.75, 1: 0.5, 2: 0.5, 8: 0.0})
    assert mixed.holds is None
    differences = "difference +0.000 ± 0.621: -0.250 (seed 0), +0.250 (seed 1), +0.000 (seed 2)"
    assert mixed.evidence == f"{differences}; only one of the two on seed 8, 9"
    nothing = compare("s", {0: 0.5}, {1: 0.5})
    assert (nothing.holds, nothing.word) == (None, "inconclusive")


def test_one_seed_supports_nothing():
    one = compare("s", {0: 0.9}, {0: 0.1})
    assert (one.holds, one.evidence) == (None, "difference +0.800 (seed 0); one seed only")


def test_ahead_on_every_seed_is_not_enough_when_the_interval_reaches_zero():
    """+0.1, +0.2, +0.6: mean 0.3, deviation √0.07, and t · √(0.07 / 3) = 0.657 is more than the mean."""
    wide = compare("s", {0: 0.1, 1: 0.2, 2: 0.6}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert wide.holds is None
    assert wide.evidence.startswith("difference +0.300 ± 0.657: ")
    narrow = compare("s", {0: 0.28, 1: 0.3, 2: 0.32}, {0: 0.0, 1: 0.0, 2: 0.0})
    assert narrow.holds is True
    assert compare("s", {0: 0.0, 1: 0.0, 2: 0.0}, {0: 0.28, 1: 0.3, 2: 0.32}).holds is False
    assert compare("s", {0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}).holds is None


def test_judged_against_a_bound():
    assert judge(Mean.of([0.85, 0.86, 0.87]), 0.8) is True
    assert judge(Mean.of([0.7, 0.9, 1.0]), 0.8) is None
    assert judge(Mean.of([0.5, 0.51, 0.52]), 0.8) is False
    assert judge(Mean.of([1.0]), 0.8) is None


def test_longer_codes_are_each_compared_with_the_shortest(tmp_path):
    """Four heads score 0.5 more on every seed, two heads differ by chance: nothing is chosen by the score."""
    scores = {1: (0.2, 0.3, 0.25), 2: (0.1, 0.5, 0.3), 4: (0.7, 0.8, 0.75)}
    rows = [
        {"method": "hyla", "num_heads": heads, "seed": seed, "compositional/r2": value}
        for heads, values in scores.items()
        for seed, value in enumerate(values)
    ]
    found = experiment("heads").verdicts(Study("laptop", rows, tmp_path))
    assert [(verdict.statement, verdict.word) for verdict in found] == [
        ("hyla: a code of 2 numbers generalises better than a code of 1.", "inconclusive"),
        ("hyla: a code of 4 numbers generalises better than a code of 1.", "supports"),
    ]


def test_the_grid_of_one_seed_ranks_nothing(tmp_path):
    cells = {
        ("softmax", "linear"): 0.1,
        ("softmax", "relu"): 0.3,
        ("rms_head", "linear"): 0.5,
        ("rms_head", "relu"): 0.9,
    }
    rows = [{"norm": norm, "value_net": net, "compositional/r2": score} for (norm, net), score in cells.items()]
    best, nonlinear = experiment("logic-grid").verdicts(Study("laptop", rows, tmp_path))
    assert best.word == nonlinear.word == "inconclusive"
    assert best.evidence.startswith("place 1 of 4 with 0.900;") and best.evidence.endswith("one seed")
    assert nonlinear.evidence == "in 100% of 2 cells; one seed"


def test_the_level_of_fig_4_is_judged_at_paper_scale_with_the_largest_runs_alone(tmp_path):
    rows = []
    search = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 1000}
    levels = {"softmax": (0.79, 0.80, 0.81), "linear": (0.5, 0.51, 0.52), "hyla": (0.6, 0.8, 1.0)}
    for (dim, depth, steps), more in (
        ((128, 4, 10), -0.4),
        ((256, 8, 10), -0.3),
        ((128, 4, 20), -0.2),
        ((256, 8, 20), 0),
    ):
        for method, scores in levels.items():
            for seed, score in enumerate(scores):
                row = {"method": method, "dim": dim, "num_layers": depth, "steps": steps, "seed": seed, **search}
                row |= {"parameters": dim * dim * depth, "iid/accuracy": 0.5, "compositional/accuracy": score + more}
                rows.append(row)
    curves = [{**row, "instances": 128 * row["steps"], "compositional": row["compositional/accuracy"]} for row in rows]
    found, words = experiment("sraven-scaling"), "comes to about 0.80 with the most data and the largest model"
    told = found.verdicts(Study("paper", rows, tmp_path, extra={"curves": curves}))
    assert [(v.statement, v.word, v.evidence) for v in told if "about 0.80" in v.statement] == [
        (f"softmax {words} (our bound: 0.75).", "supports", "0.800 ± 0.025"),
        (f"linear {words} (our bound: 0.75).", "disagrees", "0.510 ± 0.025"),
        (f"hyla {words} (our bound: 0.75).", "inconclusive", "0.800 ± 0.497"),
    ]
    laptop = found.verdicts(Study("laptop", rows, tmp_path, extra={"curves": curves}))
    assert not any("about 0.80" in verdict.statement for verdict in laptop)


def test_intervals_by_hand():
    """1, 2, 3: deviation 1, and Student's t with two degrees of freedom is 0.95 · √(2 / 0.0975) at 97.5 %."""
    mean = Mean.of([1.0, 2.0, 3.0])
    assert mean.value == 2.0
    assert mean.half_width == pytest.approx(0.95 * math.sqrt(2 / 0.0975) / math.sqrt(3), rel=1e-9)
    assert str(mean) == "2.000 ± 2.484"
    assert Mean.of([0.5]) == Mean(0.5, None, 1, (0.5,))
    assert math.isnan(Mean.of([0.5, None]).value)
    assert (Mean.of([]).count, str(Mean.of([]))) == (0, "–")


def test_score_where_the_loss_passes():
    assert score_at_loss([4.0, 2.0, 1.0], [0.0, 0.5, 0.75], 1.5) == 0.625
    assert score_at_loss([4.0, 2.0, 1.0], [0.0, 0.5, 0.75], 5.0) == 0.0
    assert score_at_loss([4.0, 2.0, 3.0, 1.0], [0.0, 0.5, 0.9, 1.0], 2.0) == 0.5  # the first time counts
    assert score_at_loss([4.0, 2.0], [0.0, 0.5], 1.5) is None


def test_widened_until_the_flops_match():
    base = override(preset("logic"), method="softmax")
    goal = step_flops(override(base, method="hyla"))
    assert step_flops(base) < goal
    wide = widened_to(base, goal)
    assert step_flops(wide) >= goal
    assert step_flops(override(wide, mlp_dim=wide.model.mlp_dim - 4)) < goal
    assert wide.replace(model=wide.model.replace(mlp_dim=256)) == base


@pytest.mark.parametrize(("module", "metric"), [(_logic, "r2"), (_sraven, "accuracy")])
def test_selection_looks_at_seen_compositions_alone(module, metric, tmp_path):
    rows = []
    for method, best in (("softmax", 1e-3), ("hyla", 3e-3)):
        for rate in (1e-3, 3e-3):
            for seed in range(2):
                good = 0.9 if rate == best else 0.5
                row = {"method": method, "seed": seed, "learning_rate": rate, "weight_decay": 0.1, "warmup_steps": 7}
                rows.append({**row, f"iid/{metric}": good, f"compositional/{metric}": 1.4 - good})
    kept = module.select(Study("paper", rows, tmp_path), ("method",))
    assert [(row["method"], row["learning_rate"], row["seed"]) for row in kept] == [
        ("softmax", 1e-3, 0),
        ("softmax", 1e-3, 1),
        ("hyla", 3e-3, 0),
        ("hyla", 3e-3, 1),
    ]


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_experiments_share_runs(scale):
    hashes = {name: {config_hash(c) for _, c in planned_runs(experiment(name), scale)} for name in EXPERIMENTS
              if name != "language"}  # fmt: skip
    assert hashes["sraven-codes"] <= hashes["sraven-ablation"]
    assert hashes["sraven-scaling"] & hashes["sraven-ablation"]
    assert hashes["in-context"] <= hashes["logic-ablation"]
    assert hashes["logic-codes"] <= hashes["logic-ablation"]
    assert hashes["cross-attention"] & hashes["logic-ablation"]
    assert hashes["cross-attention"] & hashes["sraven-scaling"]


def test_ceiling_is_that_of_the_oracle():
    from headcode.bench.tasks import sraven_split

    task = SRaven(num_features=2)
    found = _sraven.ceilings(task, 400)
    for split in ("iid", "compositional"):
        expected = sraven_split(task, split, 400)
        assert found[split]["ceiling"] == expected["ceiling"]
        assert found[split]["standard error"] == pytest.approx(expected["± 1 s.e."])
        assert found[split]["copying the panel to the left"] == expected["copy the panel to the left"]
    assert np.isfinite(list(found["iid"].values())).all()
