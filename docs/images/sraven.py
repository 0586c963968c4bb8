"""Makes the SRAVEN curves of docs/results.md: python docs/images/sraven.py

The runs of the preset, with hyla and with softmax, and the best one without auxiliary targets are in the zoo; the
others are in docs/results/sraven-fast.
"""

import json
from pathlib import Path

from headcode import zoo
from headcode.report.style import METHOD_COLOURS, PAGE_WIDTH, PALETTE, canvas, save

DOCS = Path(__file__).parents[1]
RECORDS = DOCS / "results" / "sraven-fast"
RUNS = {
    "sraven-fast, hyla": (zoo.folder("sraven-4-hyla") / "metrics.jsonl", METHOD_COLOURS["hyla"]),
    "sraven-fast, softmax": (zoo.folder("sraven-4-softmax") / "metrics.jsonl", METHOD_COLOURS["softmax"]),
    "sraven-fast, hyla, values 64 wide (stopped)": (RECORDS / "narrow.jsonl", PALETTE[2]),
    "no hints, hyla, aligned puzzles first": (zoo.folder("sraven-4-hyla-plain") / "metrics.jsonl", PALETTE[3]),
    "the paper's own setting, hyla (stopped)": (RECORDS / "paper-setting.jsonl", PALETTE[6]),
}
BATCH_SIZE = 128
METRICS = {"accuracy": "all four features right", "feature_accuracy": "one feature right"}


def curve(path, split, metric):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["step"] * BATCH_SIZE / 1e6, r[metric]) for r in records if r["kind"] == "eval" and r["split"] == split]


def draw():
    ceiling = zoo.card("sraven-4-hyla")["ceiling"]["compositional"]
    with canvas(PAGE_WIDTH, 2.9, 1, 2, sharey=True) as (figure, axes):
        for axis, (metric, words) in zip(axes, METRICS.items(), strict=True):
            for name, (path, colour) in RUNS.items():
                for split, style in (("compositional", "-"), ("iid", ":")):
                    label = name if split == "compositional" else None
                    points = curve(path, split, metric)
                    axis.plot(*zip(*points, strict=True), style, color=colour, lw=1.2, label=label)
            axis.set(xlabel="million puzzles", title=words, ylim=(0, 1), xlim=(0, None))
        axes[0].axhline(
            ceiling, color="0.5", linestyle="--", linewidth=1, label="the best that any solver can do, held out"
        )
        axes[0].plot([], [], ":", color="black", linewidth=1.2, label="dotted: seen compositions (solid: held out)")
        axes[0].set_ylabel("share")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        save(figure, DOCS / "images" / "sraven")


if __name__ == "__main__":
    draw()
