"""Score anyone's answers to exported SRAVEN puzzles, beside the exact solver.

Example: headcode export sraven --format text --count 200 --out prompts.jsonl

Then, with one answer to each prompt in answers.jsonl beside it: headcode score answers.jsonl
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._tables import aligned_table
from headcode.cli._training import Switch, print_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    answers: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")]
    """The answers, JSON lines or CSV; docs/benchmark.md has the format. Several files are compared at the end."""
    puzzles: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """The exported puzzles, or their card; by default the card beside the answers that has their hash."""
    json: Switch = False
    """Print one JSON object."""

    def run(self) -> None:
        from headcode.tasks.answers import read_answers, read_card
        from headcode.tasks.scores import score

        if not self.answers:
            raise ValueError("Name a file of answers: headcode score FILE.")
        if self.puzzles is not None and len(self.answers) > 1:
            raise ValueError("--puzzles goes with one file of answers; several are found by the cards beside them.")
        found = {}
        for answers in self.answers:
            export = read_card(self._card_of(answers))
            found[str(answers)] = score(export, read_answers(answers, export))
        if self.json:
            (only,) = found.values() if len(found) == 1 else [{"files": found}]
            print_json(only)
            return
        for name, scores in found.items():
            print(report(scores) if len(found) == 1 else f"{name}\n{report(scores)}\n")
        if len(found) > 1:
            print(comparison(found))

    def _card_of(self, answers: Path) -> Path:
        from headcode.tasks.answers import find_card
        from headcode.tasks.export import card_path

        if self.puzzles is None:
            return find_card(answers)
        card = self.puzzles if self.puzzles.name.endswith(".card.json") else card_path(self.puzzles)
        if not card.exists():
            raise ValueError(f"There is no card {card}; --puzzles is the file that headcode export wrote, or its card.")
        return card


def report(found: dict[str, Any]) -> str:
    """The scores as lines that fit a terminal."""
    rows = [("all features right", found["accuracy"])]
    rows += [("  where one answer is possible", found["one_answer"]), ("  where several are", found["several_answers"])]
    rows += [(f"  {count} different rule(s)", share) for count, share in found["distinct_rules"].items()]
    rows += [("each feature", found["feature_accuracy"])]
    rows += [(f"  rule {name}", share) for name, share in found["rules"].items()]
    rows += [(f"{count} feature(s) right", share) for count, share in found["features_right"].items()]
    rows += [("some explanation supports it", found["supported"])]
    if "variants" in found:
        rows += [
            (f"right in any of {found['variants']} variants", found["pass_any"]),
            (f"right in all {found['variants']} variants", found["pass_all"]),
        ]
    rows = [(name, share) for name, share in rows if share["count"]]
    table = {
        "": [name for name, _ in rows],
        "share": [f"{share['share']:.3f}" for _, share in rows],
        "95 %": [_bounds(share) for _, share in rows],
        "of": [f"{share['count']:,}" for _, share in rows],
        "exact solver": [f"{share['solver']:.3f}" if "solver" in share else "" for _, share in rows],
    }
    part, posterior = found["share_of_ceiling"], found["posterior"]
    lines = [
        f"{found['puzzles']:,} puzzles of {found['features']} features, split {found['split']}",
        "",
        aligned_table(table),
        "",
        f"The ceiling, the best possible accuracy, is {found['ceiling']:.3f} (exact solver).",
        f"These answers reach {part['share']:.1%} of it ({part['low']:.1%} to {part['high']:.1%}).",
        f"Not knowing the split's rule sets, the exact solver reaches {found['uninformed_solver']['share']:.3f}.",
        f"The mean posterior of an answer is {posterior['share']:.3f} ({_bounds(posterior)}).",
    ]
    if found["unreadable"]:
        lines.append(f"Not readable as a panel, and counted as wrong: {found['unreadable']:,}.")
    return "\n".join(lines)


def comparison(found: dict[str, dict[str, Any]]) -> str:
    """Several files side by side, by the number of features."""
    ordered = sorted(found.items(), key=lambda item: item[1]["features"])
    columns: dict[str, list[str]] = {
        "features": [str(scores["features"]) for _, scores in ordered],
        "split": [scores["split"] for _, scores in ordered],
        "all right": [f"{scores['accuracy']['share']:.3f}" for _, scores in ordered],
        "95 %": [_bounds(scores["accuracy"]) for _, scores in ordered],
        "ceiling": [f"{scores['ceiling']:.3f}" for _, scores in ordered],
        "of the ceiling": [f"{scores['share_of_ceiling']['share']:.1%}" for _, scores in ordered],
        "each feature": [f"{scores['feature_accuracy']['share']:.3f}" for _, scores in ordered],
        "answers": [name for name, _ in ordered],
    }
    return aligned_table(columns)


def _bounds(share: dict[str, Any]) -> str:
    return f"{share['low']:.3f} to {share['high']:.3f}"
