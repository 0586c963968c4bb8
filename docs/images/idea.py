"""Draws idea.png, the picture that explains the idea: python docs/images/idea.py"""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

INK, BLUE, ORANGE, GREEN, SOFT = "#222222", "#0072B2", "#D55E00", "#009E73", "#F2F2F2"


def box(axes, x, y, width, height, text, face=SOFT, edge="#888888", **style):
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12", fc=face, ec=edge, lw=1.2
    )
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **{"fontsize": 12, "color": INK, **style})


def arrow(axes, start, end, color=INK, bend=0.0):
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, lw=1.5, color=color, connectionstyle=style)
    )


def draw():
    figure, axes = plt.subplots(figsize=(11, 4.6))
    axes.set(xlim=(0, 22), ylim=(0, 10))
    axes.axis("off")

    axes.text(1.6, 9.4, "tokens", ha="center", fontsize=13, color=INK)
    for row, (label, face) in enumerate(
        [("", SOFT), ("key  $x_k$", "#FBE3D5"), ("", SOFT), ("query  $x_q$", "#D9EAF7"), ("", SOFT)]
    ):
        box(axes, 0.3, 6.9 - 1.5 * row, 2.6, 1.1, label, face)

    axes.text(6.9, 9.4, "code: one score a head", ha="center", fontsize=13, color=INK)
    heights = [0.7, -0.9, 1.4, 0.25, -0.5, 1.1, -1.3, 0.4]
    for head, height in enumerate(heights):
        axes.bar(5.1 + 0.5 * head, height, bottom=5.7, width=0.38, color=BLUE if height > 0 else ORANGE)
    axes.plot([4.7, 9.0], [5.7, 5.7], color="#888888", lw=1)
    axes.text(6.9, 3.7, r"$z_{h} = \mathrm{norm}_h(q_h \cdot k_h)$", ha="center", fontsize=13, color=INK)
    arrow(axes, (3.05, 6.0), (4.6, 5.8), ORANGE)  # a key is orange and a query blue, as in the explorer
    arrow(axes, (3.05, 3.1), (4.6, 5.1), BLUE)

    axes.text(14.3, 9.4, "the value network of this pair", ha="center", fontsize=13, color=INK)
    layers = [(11.2, 4), (14.2, 3), (17.2, 4)]
    nodes = [[(x, 5.7 + 0.95 * (i - (n - 1) / 2)) for i in range(n)] for x, n in layers]
    for left, right in itertools.pairwise(nodes):
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                strength = heights[(3 * i + 5 * j) % 8]
                color = BLUE if strength > 0 else ORANGE
                axes.plot([a[0], b[0]], [a[1], b[1]], color=color, lw=0.6 + 1.6 * abs(strength), alpha=0.75, zorder=1)
    for column in nodes:
        for place in column:
            axes.add_patch(Circle(place, 0.26, fc="white", ec=INK, lw=1.2, zorder=2))
    axes.text(12.7, 3.2, r"$\sum_h z_h W^{value}_h$", ha="center", fontsize=13, color=INK)
    axes.text(15.7, 3.2, r"$\sum_h z_h W^{out}_h$", ha="center", fontsize=13, color=INK)
    axes.text(14.2, 7.55, r"$\varphi$", ha="center", fontsize=15, color=INK)
    arrow(axes, (9.2, 5.7), (10.6, 5.7))
    axes.text(9.9, 6.0, "sets\nweights", ha="center", va="bottom", fontsize=10, color=INK)
    arrow(axes, (3.05, 6.4), (10.95, 7.45), "#E39A66", bend=-0.22)
    axes.text(6.9, 8.45, "the key's token goes in", ha="center", fontsize=11, color="#A34700")

    arrow(axes, (17.7, 5.7), (19.0, 5.7))
    box(axes, 19.1, 5.1, 2.6, 1.2, r"$\sum_k$", "#DDF3EB", fontsize=14)
    axes.text(20.4, 4.55, "over all keys:\noutput of query $q$", ha="center", va="top", fontsize=11, color=INK)

    axes.text(
        12.4,
        1.55,
        "softmax and linear attention:  no $\\varphi$, so the generated network is one matrix per pair",
        ha="center",
        fontsize=12,
        color=INK,
    )
    axes.text(
        12.4,
        0.6,
        "HYLA:  $\\varphi$ = ReLU, and the code is normalised across the heads",
        ha="center",
        fontsize=12,
        color=GREEN,
        fontweight="bold",
    )
    folder = Path(__file__).parent
    figure.savefig(folder / "idea.png", dpi=160, bbox_inches="tight", facecolor="white")


draw()
