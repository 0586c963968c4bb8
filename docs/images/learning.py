"""Makes the learning curves and tables of docs/results.md from trained runs: python docs/images/learning.py [RUNS]

RUNS has a folder for each learning rate (1e-3, 3e-3) and in it a run folder METHOD-SEED of each training; evaluations
and configurations are copied to docs/results/learning, and figure and tables are made from there.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path

from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, canvas, save

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "learning"
RATES = ("1e-3", "3e-3")
METHODS, SPLITS = ("hyla", "softmax", "linear"), ("iid", "compositional", "novel")
# The authors' code under this protocol, one seed: R² in training and on held-out compositions.
AUTHORS = {"hyla": (0.87, 0.775), "softmax": (0.89, 0.638), "linear": (0.82, 0.539)}


def collect(runs):
    for rate in RATES:
        (RESULTS / rate).mkdir(parents=True, exist_ok=True)
        for run in sorted((Path(runs) / rate).iterdir()):
            lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind": "eval"' in line]
            (RESULTS / rate / f"{run.name}.jsonl").write_text("\n".join(lines) + "\n")
            shutil.copy(run / "config.json", RESULTS / rate / f"{run.name}-config.json")


def curves(rate, method, split, metric="r2"):
    """For every seed: steps and R²."""
    found = []
    for path in sorted((RESULTS / rate).glob(f"{method}-?.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([(r["step"], r[metric]) for r in records if r["split"] == split])
    return found


def mean_of(found):
    """Steps and the mean R² over seeds."""
    return [(points[0][0], statistics.mean(r2 for _, r2 in points)) for points in zip(*found, strict=True)]


def table(rate):
    lines = ["| method | seeds | iid | compositional | novel | compositional, seed by seed |"]
    lines.append("| --- " * 6 + "|")
    for method in METHODS:
        ends = {split: [curve[-1][1] for curve in curves(rate, method, split)] for split in SPLITS}
        count = len(ends["iid"])
        if not count:
            continue
        spread = {split: f" ± {statistics.stdev(ends[split]):.3f}" if count > 1 else "" for split in SPLITS}
        cells = [f"{statistics.mean(ends[split]):.3f}{spread[split]}" for split in SPLITS]
        each = ", ".join(f"{end:.3f}" for end in ends["compositional"])
        lines.append(f"| `{method}` | {count} | " + " | ".join(cells) + f" | {each} |")
    return "\n".join(lines)


def draw():
    titles = {"iid": "seen compositions", "compositional": "held-out compositions", "novel": "novel terms"}
    with canvas(PAGE_WIDTH, 4.2, 2, 3, sharex=True, sharey=True) as (figure, axes):
        for rate, row in zip(RATES, axes, strict=True):
            for axis, split in zip(row, SPLITS, strict=True):
                for method in METHODS:
                    colour = METHOD_COLOURS[method]
                    found = curves(rate, method, split)
                    for curve in found:
                        axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.4, lw=0.7)
                    axis.plot(*zip(*mean_of(found), strict=True), color=colour, lw=2)
                    if split == "compositional":
                        axis.plot(8200, AUTHORS[method][1], "<", color=colour, clip_on=False)
                if rate == RATES[0]:
                    axis.set_title(titles[split])
                axis.set(ylim=(-0.2, 1), xlim=(0, 8000))
            row[0].set_ylabel(f"R², rate {rate}")
        for axis in axes[1]:
            axis.set_xlabel("step")
        for method in METHODS:
            axes[0, 0].plot([], [], color=METHOD_COLOURS[method], label=method)
        axes[0, 0].plot([], [], color="0.4", lw=0.7, label="single seeds")
        axes[0, 0].legend(loc="lower right", title="mean of 3 seeds", title_fontsize=7)
        axes[0, 1].annotate("◁ authors' code, one seed", (7900, -0.14), ha="right", fontsize=7)
        save(figure, DOCS / "images" / "learning")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(sys.argv[1])
    for rate in RATES:
        print(f"rate {rate}\n\n{table(rate)}\n")
    draw()
