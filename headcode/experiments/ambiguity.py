"""How many SRAVEN puzzles are ambiguous, by the authors' check and by the exact solver, on the same puzzles."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headcode.experiments._readings import draw_readings
from headcode.experiments.base import Experiment, NamedConfigs, Row, Scale, Study, Table, Verdict
from headcode.report.style import GREY, PAGE_WIDTH, PALETTE, canvas, save
from headcode.tasks import SRaven, oracle
from headcode.tasks.ambiguity import answers_with_sorted_rules, authors_check, authors_layout, changed_features
from headcode.tasks.intervals import wilson_interval

NUM_FEATURES = (1, 2, 3, 4, 5, 6)
CLAIMED = 0.005
"""The paper's bound on the share of ambiguous puzzles."""
MOST_ANSWERS = 4
"""Of a puzzle that is drawn."""
SHOWN = {1: "one feature changes", 2: "two features change", 4: "all four features change"}
"""The puzzles that are drawn, by how many features their rival answer changes."""


class Ambiguity(Experiment):
    name = "ambiguity"
    trains = False
    title = "How many SRAVEN puzzles are ambiguous, by two definitions"
    question = "What share of SRAVEN puzzles has more than one answer that fits the visible panels?"
    claim = "Appendix B.2: fewer than half a percent of the puzzles are ambiguous."
    selection = (
        "None: the first puzzles of each split of seed 0, no training. Drawn are held-out puzzles with at most four "
        "answers, those whose own answer and rival are both most probable, the first of several."
    )

    def runs(self, scale: Scale) -> NamedConfigs:
        return ()

    def analyse(self, study: Study, say: Callable[[str], None]) -> None:
        count = 2_000 if study.scale == "smoke" else 100_000
        task = SRaven()
        rows: list[Row] = []
        for split in task.splits:
            say(f"{count:,} puzzles of {split}")
            rows.append(measured(task, split, count, "ours"))
        say(f"{count:,} puzzles of iid in the authors' layouts")
        rows += authors_rows(task, "iid", count)
        for num_features in NUM_FEATURES:
            say(f"{count:,} puzzles with {num_features} feature(s)")
            rows.append(measured(SRaven(num_features=num_features, held_out=0), "iid", count, "by number of features"))
        study.rows = rows
        for changed, words in SHOWN.items():
            shown = undecided(task, "compositional", count, changed)
            if shown is not None:
                paths = draw_readings(*shown, words, study.folder / f"{self.name}-{changed}")
                say(f"A puzzle where {words}: {paths[-1]}")

    def tables(self, study: Study) -> list[Table]:
        ours = study.where(layout="ours")
        rivals: list[Row] = []
        for row in ours:
            shares = {f"{k} of 4 changed (%)": 100 * row[f"changed_{k}"] / row["puzzles"] for k in (1, 2, 3, 4)}
            rivals.append({"split": row["split"], "its own answer alone (%)": 100 - percent(row, "several"), **shares})
        layouts = [row for row in study.rows if row["layout"] not in ("ours", "by number of features")]
        return [
            Table(
                "Ambiguous by the authors' check, and with several answers by the exact solver",
                [both({"split": row["split"]}, row) for row in ours],
            ),
            Table("Share of puzzles with a rival answer that changes exactly so many features", rivals),
            Table(
                "The best that a solver can do (% of puzzles answered right), "
                "and how sure it can be (% of all puzzles)",
                [
                    {
                        "split": row["split"],
                        "all puzzles": 100 * row["ceiling"],
                        "those with several answers": 100 * row["ceiling_several"],
                        "best posterior below 0.99": percent(row, "unsure"),
                        "at most 0.5": percent(row, "undecided"),
                    }
                    for row in ours
                ],
            ),
            Table("The same iid puzzles in the authors' layouts", [both({"layout": r["layout"]}, r) for r in layouts]),
            Table(
                "By number of features",
                [both({"features": row["features"]}, row) for row in study.where(layout="by number of features")],
            ),
        ]

    def verdicts(self, study: Study) -> list[Verdict]:
        found = []
        for key, words in (("check", "the authors' check"), ("several", "the exact solver")):
            bounds = [wilson_interval(row[key] / row["puzzles"], row["puzzles"]) for row in study.where(layout="ours")]
            below, above = all(high < CLAIMED for _, high in bounds), all(low > CLAIMED for low, _ in bounds)
            shares = (f"{row['split']} {share_in_words(row, key)}" for row in study.where(layout="ours"))
            statement = f"By {words}, fewer than half a percent of the puzzles are ambiguous."
            found.append(Verdict(statement, True if below else False if above else None, "; ".join(shares)))
        return found

    def draw(self, study: Study, stem: Path) -> list[Path]:
        with canvas(PAGE_WIDTH, 2.8, 1, 2) as (figure, axes):
            rows = study.where(layout="by number of features")
            kinds = (("several", "exact solver: several answers", PALETTE[1], "o"),
                     ("check", "authors' check: another answer in every feature", PALETTE[0], "s"))  # fmt: skip
            for key, label, colour, marker in kinds:
                kept = [row for row in rows if row[key]]
                y = np.array([percent(row, key) for row in kept])
                low, high = np.array([interval(row, key) for row in kept]).T
                x = [row["features"] for row in kept]
                axes[0].errorbar(x, y, (y - low, high - y), color=colour, marker=marker, capsize=2, label=label)
            axes[0].axhline(100 * CLAIMED, color=GREY, linestyle="--", linewidth=0.9)
            axes[0].annotate("the paper: below 0.5 %", (3.2, 100 * CLAIMED), xytext=(0, 3), textcoords="offset points",
                             fontsize=7, color="0.35")  # fmt: skip
            axes[0].set(yscale="log", xlabel="features of a panel", ylabel="ambiguous puzzles, %")
            axes[0].yaxis.set_major_formatter("{x:g}")
            axes[0].set_xticks(NUM_FEATURES)
            low, high = axes[0].get_ylim()
            axes[0].set_ylim(low / 1.5, 100)
            axes[0].legend(loc="upper left", bbox_to_anchor=(0, 1.22))
            (row,) = study.where(layout="ours", split="iid")
            values = [100 * row[f"changed_{k}"] / row["puzzles"] for k in (1, 2, 3, 4)]
            colours = [PALETTE[1]] * 3 + [PALETTE[0]]
            drawn = axes[1].bar(range(1, 5), values, 0.65, color=colours)
            axes[1].bar_label(drawn, [f"{value:.2f} %" for value in values], fontsize=7, padding=2)
            axes[1].set(xlabel="features (of 4) in which a rival answer differs", ylabel="puzzles with such a rival, %")
            axes[1].set_xticks(range(1, 5))
            axes[1].set_ylim(0, 1.2 * max(values))
            axes[1].annotate("all that the\ncheck looks for", (4, values[-1]), xytext=(0, 16),
                             textcoords="offset points", ha="center", fontsize=7, color=PALETTE[0])  # fmt: skip
            return save(figure, stem)


def measured(task: SRaven, split: str, count: int, layout: str) -> Row:
    """Both definitions, and what rivals change, on the first puzzles of a split."""
    puzzles = task.raw(split, np.arange(count))["puzzles"]
    solutions = oracle.solve_split(task, split, puzzles)
    several, best = solutions.num_answers > 1, solutions.best_probability
    changed = changed_features(puzzles, solutions)
    assert changed[:, 0].all(), "a puzzle's own answer is one of its answers"
    return {
        "layout": layout,
        "split": split,
        "seed": task.seed,
        "features": task.num_features,
        "puzzles": count,
        "check": int(authors_check(puzzles, task.num_values, task.permute).sum()),
        "several": int(several.sum()),
        **{f"changed_{k}": int(changed[:, k].sum()) for k in range(1, task.num_features + 1)},
        "ceiling": float(best.mean()),
        "ceiling_several": float(best[several].mean()) if several.any() else None,
        "unsure": int((best < 0.99).sum()),
        "undecided": int((best < 0.5 + 1e-9).sum()),
    }


def authors_rows(task: SRaven, split: str, count: int) -> list[Row]:
    """The same puzzles as the authors' generator would lay them out."""
    unpermuted, permuted = authors_layout(task.raw(split, np.arange(count)))
    base = {"split": split, "seed": task.seed, "features": task.num_features, "puzzles": count}
    matched = oracle.solve(unpermuted, task.num_values, permuted=False).num_answers > 1
    by_sorting = sum(len(answers_with_sorted_rules(puzzle, task.num_values)) > 1 for puzzle in unpermuted[matched])
    all_matchings, known_matching = (
        int(authors_check(unpermuted, task.num_values, free).sum()) for free in (True, False)
    )
    layouts = {
        "permuted": (
            int(authors_check(permuted, task.num_values).sum()),
            int((oracle.solve(permuted, task.num_values).num_answers > 1).sum()),
        ),
        "unpermuted, all matchings tried": (
            all_matchings,
            int((oracle.solve(unpermuted, task.num_values).num_answers > 1).sum()),
        ),
        "unpermuted, the matching known": (known_matching, int(matched.sum())),
        "unpermuted, the order of the rules known too": (None, by_sorting),
    }
    return [{"layout": name, **base, "check": pair[0], "several": pair[1]} for name, pair in layouts.items()]


def undecided(
    task: SRaven, split: str, count: int, changed: int
) -> tuple[str, np.ndarray, list[oracle.Explanation]] | None:
    """A puzzle with a rival that changes so many features, its name, and the best reading of each of its answers.

    A reading's probability is that of its answer; the puzzle's own answer comes first. The puzzle is the one where own
    answer and rival are both most probable (to two decimals); of several the one with the fewest answers, then with the
    fewest readings. It has four answers at most. None if there is no such puzzle.
    """
    puzzles = task.raw(split, np.arange(count))["puzzles"]
    solutions = oracle.solve_split(task, split, puzzles)
    truth = puzzles[:, -1, -1]
    owner = np.repeat(np.arange(count), solutions.num_answers)
    rivals = (solutions.flat_answers != truth[owner]).sum(axis=1) == changed
    rivals &= solutions.num_answers[owner] <= MOST_ANSWERS
    if not rivals.any():
        return None
    owner, probable = owner[rivals], solutions.flat_probabilities[rivals]
    weaker = np.minimum(probable, solutions.probability_of(truth)[owner]).round(2)
    instance = int(owner[np.lexsort((solutions.explanations[owner], solutions.num_answers[owner], -weaker))[0]])
    prior = task.compositions[task.split_compositions[split]]
    found: dict[tuple[int, ...], oracle.Explanation] = {}
    for reading in oracle.explain(puzzles[instance], task.num_values, compositions=prior):
        answer = tuple(reading.answer.tolist())
        known = found.setdefault(answer, dataclasses.replace(reading, probability=0.0))
        found[answer] = dataclasses.replace(known, probability=known.probability + reading.probability)
    own = found.pop(tuple(truth[instance].tolist()))
    others = sorted(found.values(), key=lambda reading: -reading.probability)
    return f"{split}, instance {instance}", puzzles[instance], [own, *others]


def both(first: Row, row: Row) -> Row:
    """A row of a table with both shares and their intervals."""
    for key, words in (("check", "authors' check"), ("several", "exact solver")):
        known = row[key] is not None
        first[f"{words} (%)"] = percent(row, key) if known else None
        first[f"{words}, 95 %"] = "{:.3f} to {:.3f}".format(*interval(row, key)) if known else None
    return first


def percent(row: Row, key: str) -> float:
    return 100 * float(row[key]) / float(row["puzzles"])


def interval(row: Row, key: str) -> tuple[float, float]:
    """Wilson's 95 % interval, in percent."""
    low, high = wilson_interval(row[key] / row["puzzles"], row["puzzles"])
    return 100 * low, 100 * high


def share_in_words(row: Row, key: str) -> str:
    return "{:.3f} % ({:.3f} to {:.3f})".format(percent(row, key), *interval(row, key))
