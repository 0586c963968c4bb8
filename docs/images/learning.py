"""Makes the learning curves and the table of docs/results.md from trained runs: python docs/images/learning.py RUNS

RUNS has a run folder METHOD-SEED of each training; its evaluations and configuration are copied to
docs/results/learning, and the figure is drawn from there. Without RUNS, only the figure and the table are made.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path

from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, canvas, save

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "learning"
METHODS, SPLITS = ("hyla", "softmax", "linear"), ("iid", "compositional", "novel")
# The authors' code under this protocol, one seed: R² in training and on held-out compositions.
AUTHORS = {"hyla": (0.87, 0.775), "softmax": (0.89, 0.638), "linear": (0.82, 0.539)}


def collect(runs):
    for run in sorted(Path(runs).iterdir()):
        lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind": "eval"' in line]
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{run.name}.jsonl").write_text("\n".join(lines) + "\n")
        shutil.copy(run / "config.json", RESULTS / f"{run.name}-config.json")


def curves(method, split, metric="r2"):
    """For every seed: steps and R²."""
    found = []
    for path in sorted(RESULTS.glob(f"{method}-?.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([(r["step"], r[metric]) for r in records if r["split"] == split])
    return found


def table():
    lines = ["| method | seeds | iid | compositional | novel | authors: training | authors: compositional |"]
    lines.append("| --- " * 7 + "|")
    for method in METHODS:
        cells = []
        for split in SPLITS:
            ends = [curve[-1][1] for curve in curves(method, split)]
            spread = f" ± {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
            cells.append(f"{statistics.mean(ends):.3f}{spread}")
        count = len(curves(method, "iid"))
        lines.append(f"| `{method}` | {count} | " + " | ".join(cells) + " | {} | {} |".format(*AUTHORS[method]))
    return "\n".join(lines)


def draw():
    with canvas(PAGE_WIDTH, 2.5, columns=3, sharey=True) as (figure, axes):
        for axis, split in zip(axes, SPLITS, strict=True):
            for method in METHODS:
                for seed, curve in enumerate(curves(method, split)):
                    label = method if seed == 0 and split == SPLITS[0] else None
                    axis.plot(*zip(*curve, strict=True), color=METHOD_COLOURS[method], alpha=0.85, lw=1.1, label=label)
                if split == "compositional":
                    axis.plot(8200, AUTHORS[method][1], "<", color=METHOD_COLOURS[method], clip_on=False)
            axis.set(title={"iid": "seen compositions", "compositional": "held-out compositions"}.get(split, split))
            axis.set(xlabel="step", ylim=(-0.05, 1), xlim=(0, 8000))
        axes[0].set_ylabel("R²")
        axes[0].legend(loc="lower right")
        axes[1].annotate("◁ authors' code", (7900, 0.03), ha="right", fontsize=7)
        axes[2].set_title("novel terms")
        save(figure, DOCS / "images" / "learning")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(sys.argv[1])
    print(table())
    draw()
