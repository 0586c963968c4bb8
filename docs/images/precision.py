"""What rounding products to bf16 costs: both tasks, three seeds, each run in float32 and in bf16 on one CPU thread.

    python docs/images/precision.py RUNS [--steps N]    twelve runs, or what RUNS lacks of them
    python docs/images/precision.py                     figure and table again, from docs/results/precision

A run and its pair have the same seed: the same weights, data, dropout and held-out compositions.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from headcode.report.results import t_half_width
from headcode.report.style import PAGE_WIDTH, PALETTE, canvas, save

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results" / "precision"
SEEDS = (0, 1, 2)
COLOURS = {"float32": PALETTE[0], "bf16": PALETTE[1]}
SPLITS = {"iid": "seen compositions", "compositional": "held-out compositions"}
# Preset, score and what that is called; both have 2,000 steps.
TASKS = {"logic": ("logic-small", "r2", "R²"), "sraven": ("sraven-small", "accuracy", "all features right")}


def train(runs, steps):
    RESULTS.mkdir(parents=True, exist_ok=True)
    for task, (preset, _, _) in TASKS.items():
        for seed in SEEDS:
            for precision in COLOURS:
                name = f"{task}-{precision}-{seed}"
                out = Path(runs) / name
                options = ["--seed", str(seed), "--eval-every", str(max(1, steps // 10)), "--steps", str(steps)]
                options += ["--preset", preset, "--precision", precision, "--threads", "1", "--out", str(out)]
                # A run that has ended is left as it is; one that was stopped goes on.
                subprocess.run([sys.executable, "-m", "headcode", "train", task, *options], check=True)
                lines = [line for line in (out / "metrics.jsonl").read_text().splitlines() if '"kind": "eval"' in line]
                (RESULTS / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
                shutil.copy(out / "config.json", RESULTS / f"{name}-config.json")


def curve(task, precision, seed, split):
    """Steps and scores."""
    lines = (RESULTS / f"{task}-{precision}-{seed}.jsonl").read_text().splitlines()
    score = TASKS[task][1]
    return [(r["step"], r[score]) for r in map(json.loads, lines) if r["split"] == split]


def table():
    lines = ["| task, score | split | float32 | bf16 | bf16 - float32, seed by seed | mean, 95 % interval |"]
    lines.append("| --- " * 6 + "|")
    for task, (_, _, score) in TASKS.items():
        for split, title in SPLITS.items():
            ends = {p: [curve(task, p, seed, split)[-1][1] for seed in SEEDS] for p in COLOURS}
            differences = [b - a for a, b in zip(ends["float32"], ends["bf16"], strict=True)]
            means = " | ".join(f"{statistics.mean(ends[p]):.3f} ± {statistics.stdev(ends[p]):.3f}" for p in COLOURS)
            each = ", ".join(f"{difference:+.4f}" for difference in differences)
            interval = f"{statistics.mean(differences):+.4f} ± {t_half_width(differences):.4f}"
            lines.append(f"| {task}, {score} | {title} | {means} | {each} | {interval} |")
    return "\n".join(lines)


def draw():
    with canvas(PAGE_WIDTH, 3.8, len(TASKS), len(SPLITS), sharex="row", sharey="row") as (figure, axes):
        for (task, (_, _, score)), row in zip(TASKS.items(), axes, strict=True):
            for axis, (split, title) in zip(row, SPLITS.items(), strict=True):
                for precision, colour in COLOURS.items():
                    for seed in SEEDS:
                        points = curve(task, precision, seed, split)
                        axis.plot(*zip(*points, strict=True), color=colour, lw=1, label=None if seed else precision)
                axis.set_title(f"{task}, {title}")
            row[0].set_ylabel(score)
        for axis in axes[-1]:
            axis.set_xlabel("step")
        axes[0, 0].legend(loc="lower right", title="three seeds each", title_fontsize=7)
        save(figure, DOCS / "images" / "precision")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.runs is not None:
        train(arguments.runs, arguments.steps)
    print(table())
    draw()
