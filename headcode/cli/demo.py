"""The paper in under three minutes: three methods trained side by side, their codes decoded, puzzles solved.

Trains softmax, linear and HYLA attention on fuzzy logic, compares them on compositions that training never had, decodes
the terms from their codes, then lets a SRAVEN model of the zoo solve unseen puzzles, next to what is possible at all.
Writes one page with everything: report.html.

Example: headcode demo --out out/demo
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.sweep.plan import Configs

METHODS = ("softmax", "linear", "hyla")
SPLITS = ("iid", "compositional", "novel")


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode demo`."""

    out: Path = Path("out/demo")
    """Folder for the runs, the figures and report.html; what is trained in it is not trained again."""
    steps: int | None = None
    """Steps of each training run; the preset's unless given."""
    puzzles: int = 1000
    """Unseen puzzles to solve."""
    seed: int = 0
    fresh: bool = False
    """Delete what an earlier demo trained in the folder, and train again."""

    def run(self) -> None:
        from headcode.cli._demo_puzzles import choose_model, solve_puzzles
        from headcode.cli._generated_network import draw_opened, in_words, open_layer
        from headcode.sweep.plan import plan

        if self.puzzles < 1:
            raise ValueError(f"--puzzles must be 1 or more, got {self.puzzles}.")
        if self.out.is_file():
            raise ValueError(f"--out {self.out} is a file; choose a folder for the demo.")
        start = time.monotonic()
        if self.fresh:
            # Only the demo's own: other runs may be in the folder.
            for run in plan(self._configs(), self.out):
                shutil.rmtree(run.folder, ignore_errors=True)
        self.out.mkdir(parents=True, exist_ok=True)
        print("1. Attention is a hypernetwork\n", flush=True)
        opened = open_layer("hyla", self.seed)
        idea = in_words(opened, "hyla")
        print(idea + "\n", flush=True)
        picture = draw_opened(opened, "hyla", self.out / "figures")
        print("2. Three methods on fuzzy logic, side by side\n", flush=True)
        rows = self._train()
        print("\n3. What their codes tell\n", flush=True)
        table = self._compare(rows)
        print("\n4. Unseen puzzles\n", flush=True)
        solved = solve_puzzles(choose_model(), self.puzzles, self.out / "figures")
        print(solved.words, flush=True)
        page = self._write_page(idea, picture, rows, table, dataclasses.asdict(solved))
        print(f"\n{time.monotonic() - start:.0f} s. Everything on one page: {page}\n")
        print("Next:")
        print("  headcode puzzle --instance 7 --answer            look at a puzzle and what the exact solver says")
        print("  headcode train logic --method hyla               the paper's model, 8,000 steps")
        print(
            "  headcode reproduce logic-ablation --scale smoke  a figure of the paper, in seconds, to see how it works"
        )
        print("  headcode eval zoo/logic-hyla                     a trained model that comes with the package")
        print("  from headcode import HyperAttention              HYLA in a model of your own")

    def _configs(self) -> "Configs":
        from headcode.presets import preset
        from headcode.run import override
        from headcode.sweep import grid

        base = override(preset("logic-small"), seed=self.seed)
        if self.steps is not None:
            base = override(base, steps=self.steps)
        return grid(base, method=METHODS)

    def _train(self) -> list[dict[str, Any]]:
        from headcode.cli.sweep import plain_endings
        from headcode.processes import available_cores
        from headcode.sweep import run_sweep

        with plain_endings():
            return run_sweep(self._configs(), self.out, jobs=min(len(METHODS), available_cores()), threads=1)

    def _compare(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Scores of every split, and how well a linear decoder finds the terms in the codes of held-out functions."""
        from headcode.analysis.decode import decode
        from headcode.cli._tables import aligned_table
        from headcode.experiments.pages import table_cells

        table = []
        for row in rows:
            result = decode(row["folder"], inputs="fixed_context", controls=(), fit_size=1024, test_size=1024)
            f1 = {r["layer"]: r["macro_f1"] for r in result["rows"] if (r["source"], r["subset"]) == ("codes", "all")}
            layer = max(f1)  # the last: the best one would be chosen by the score that is shown
            scores = {split: row[f"{split}/r2"] for split in SPLITS}
            entry = {"method": row["method"], "training loss": row["train/loss"], **scores}
            table.append({**entry, "decoding F1": f1[layer], "layer": layer})
        print(aligned_table(table_cells(table)))
        print("\nR² on fresh functions of seen compositions (iid), of held-out compositions, and of terms never seen.")
        print(
            "Decoding F1: the terms of held-out functions, read from the codes by a linear decoder fitted on seen ones."
        )
        return table

    def _write_page(
        self,
        idea: str,
        picture: Path,
        rows: list[dict[str, Any]],
        table: list[dict[str, Any]],
        solved: dict[str, Any],
    ) -> Path:
        from headcode.report.curves import scores_by_split, training_curves
        from headcode.report.page import Figure, Page, Preformatted, Table, Text

        figures = self.out / "figures"
        runs = {row["method"]: row["folder"] for row in rows}
        curves = training_curves(runs, figures / "curves", metric="r2")[0]
        bars = scores_by_split({row["method"]: {s: row[f"{s}/r2"] for s in SPLITS} for row in rows}, figures / "scores")
        steps, seed = rows[0]["steps"], rows[0]["seed"]
        page = Page(
            "Attention as a hypernetwork",
            f"The demo of headcode: three methods after {steps:,} steps on fuzzy logic (seed {seed}), unseen puzzles.",
        )
        page.section(
            "The idea",
            Text(
                "The scores that a query gives a key across the heads are a short vector, the code. It configures the "
                "network that turns the key's token into its contribution to the output. Softmax and linear attention "
                "generate a linear network; HYLA generates one with a nonlinearity inside."
            ),
            Figure(picture, "One query and six keys of a random HYLA layer: code, generated weights, contribution."),
            Preformatted(idea, "The same in numbers"),
        )
        page.section(
            "Three methods on fuzzy logic",
            Text(
                "Each model sees points of a fuzzy-logic function and predicts the value at the last one. Some "
                "combinations of terms are held out: the question is whether a model composes what it knows."
            ),
            Table(table),
            Figure(bars[0], "R² by split. One seed and a short training: a look, not a result; see docs/results.md."),
            Figure(curves, "R² along training: seen compositions, held-out compositions, terms never seen."),
        )
        page.section(
            "Unseen puzzles",
            Text(solved["summary"]),
            Table(solved["scores"]),
            Figure(Path(solved["picture"]), solved["caption"], width="min(100%, 30rem)"),
            Preformatted(solved["words"], "As text"),
        )
        return page.write(self.out / "report.html")
