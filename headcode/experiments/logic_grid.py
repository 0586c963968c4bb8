"""Fuzzy logic: every norm with every value network."""

from pathlib import Path

import numpy as np

from headcode.experiments._logic import at_one_rate
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.report.style import PAGE_WIDTH, canvas, save
from headcode.sweep import grid

# Named here, so that a norm that is added to the package adds no runs to a finished experiment.
NORMS: tuple[str, ...] = ("softmax", "none", "rms_head", "softmax_head", "layer_head")
VALUE_NETS: tuple[str, ...] = ("linear", "deep_linear", "relu", "gelu", "silu", "tanh", "swiglu")


class LogicGrid(Experiment):
    name = "logic-grid"
    title = "Fuzzy logic: other norms and other nonlinearities"
    question = "Is HYLA's pair (rms_head, relu) special, or do other norms and nonlinearities do as well?"
    claim = "The paper compares three norms with linear, deep linear and ReLU value networks, and no others."
    selection = (
        "One seed, one learning rate (3e-3) and one decay (0.1) for every cell, last checkpoint: a map to choose from, "
        "not a ranking. (The `swiglu` value network has more parameters, all others equally many.)"
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        base = at_one_rate(scale, steps=2000, eval_every=1000)
        norms, nets = NORMS, VALUE_NETS
        if scale == "smoke":
            norms, nets = ("softmax", "rms_head"), ("linear", "relu", "swiglu")
        yield from grid(base, norm=norms, value_net=nets)

    def tables(self, study: Study) -> list[Table]:
        tables = []
        for split in ("compositional", "iid", "novel"):
            rows: list[Row] = []
            for norm in study.values("norm"):
                scores = {net: study.mean(f"{split}/r2", norm=norm, value_net=net) for net in study.values("value_net")}
                rows.append({"norm": norm, **scores})
            tables.append(Table(f"R² on `{split}`, value networks across", rows))
        return tables

    def verdicts(self, study: Study) -> list[Verdict]:
        score = {(row["norm"], row["value_net"]): row["compositional/r2"] for row in study.rows}
        score = {pair: value for pair, value in score.items() if value is not None}
        hyla = score.get(("rms_head", "relu"))
        if hyla is None:
            return [Verdict("HYLA's pair is among the cells.", None, "it has no score")]
        ranked = sorted(score, key=lambda pair: -score[pair])
        best = ", ".join(f"{norm} + {net} {score[norm, net]:.3f}" for norm, net in ranked[:5])
        place = ranked.index(("rms_head", "relu")) + 1
        nonlinear = {net for net in study.values("value_net")} - {"linear", "deep_linear"}
        gains = [
            score[norm, net] - score[norm, "linear"]
            for norm in study.values("norm")
            for net in nonlinear
            if (norm, net) in score and (norm, "linear") in score
        ]
        share = f"in {np.mean([gain > 0 for gain in gains]):.0%} of {len(gains)} cells" if gains else "no cells"
        # One seed a cell: it ranks nothing, whatever comes out.
        return [
            Verdict(
                "(rms_head, relu) is the best cell.",
                None,
                f"place {place} of {len(ranked)} with {hyla:.3f}; the best cells: {best}; one seed",
            ),
            Verdict("A nonlinear value network beats the linear one under the same norm.", None, f"{share}; one seed"),
        ]

    def draw(self, study: Study, stem: Path) -> list[Path]:
        norms, nets = study.values("norm"), study.values("value_net")
        with canvas(PAGE_WIDTH, 0.9 + 0.42 * len(norms), 1, 2, sharey=True) as (figure, axes):
            for panel, (split, title) in zip(
                axes, (("compositional", "held-out compositions"), ("iid", "seen compositions")), strict=True
            ):
                values = np.array(
                    [[study.mean(f"{split}/r2", norm=norm, value_net=net).value for net in nets] for norm in norms]
                )
                image = panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
                for row in range(len(norms)):
                    for column in range(len(nets)):
                        bright = np.nan_to_num(values[row, column]) > 0.6
                        text = "–" if np.isnan(values[row, column]) else f"{values[row, column]:.2f}"
                        panel.text(column, row, text, ha="center", va="center", color="black" if bright else "white",
                                   fontsize=6.5)  # fmt: skip
                panel.set_xticks(range(len(nets)), nets, rotation=30, ha="right")
                panel.set_yticks(range(len(norms)), norms)
                panel.set_title(f"R² on {title}")
                panel.set_xlabel("value network")
                panel.spines[:].set_visible(False)
                panel.tick_params(length=0)
            axes[0].set_ylabel("norm of the codes")
            figure.colorbar(image, ax=axes, shrink=0.9, label="R² (below 0 as 0)")
            return save(figure, stem)
