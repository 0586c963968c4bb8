"""Score anyone's answers to exported SRAVEN puzzles, beside the exact solver.

Example: headcode export sraven --format text --count 200 --out prompts.jsonl

Then, with one answer to each prompt in answers.jsonl: headcode score answers.jsonl --puzzles prompts.jsonl
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from headcode.cli._training import Switch, print_json
from headcode.tasks.answers import read_answers, read_card, score
from headcode.tasks.export import card_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    answers: tyro.conf.Positional[Path]
    """The answers, JSON lines or CSV; docs/tasks.md has the format."""
    puzzles: Path
    """The exported puzzles, or their card."""
    json: Switch = False
    """Print one JSON object."""

    def run(self) -> None:
        card = self.puzzles if self.puzzles.name.endswith(".card.json") else card_path(self.puzzles)
        export = read_card(card)
        found = score(export, read_answers(self.answers, export))
        if self.json:
            print_json(found)
        else:
            print(report(found))


def report(found: dict[str, Any]) -> str:
    """The scores as lines that fit a terminal."""
    lines = [f"{found['puzzles']:,} puzzles of {found['features']} features, split {found['split']}", ""]
    rows = [("all features right", found["accuracy"])]
    rows += [("  where one answer is possible", found["one_answer"]), ("  where several are", found["several_answers"])]
    rows += [("some explanation supports it", found["supported"]), ("each feature", found["feature_accuracy"])]
    rows += [(f"  rule {name}", share) for name, share in found["rules"].items()]
    rows += [(f"all right, {count} different rule(s)", share) for count, share in found["distinct_rules"].items()]
    if "variants" in found:
        rows += [
            (f"right in any of {found['variants']} variants", found["pass_any"]),
            (f"right in all {found['variants']} variants", found["pass_all"]),
        ]
    for name, share in rows:
        if share["count"]:
            interval = f"{share['low']:.3f} to {share['high']:.3f}"
            lines.append(f"{name:<32}{share['share']:.3f}   {interval}   of {share['count']:,}")
    lines += [
        "",
        f"The best possible accuracy is {found['ceiling']:.3f} (exact solver); these answers reach "
        f"{found['share_of_ceiling']:.1%} of it.",
        f"The mean posterior of an answer is {found['posterior']:.3f}. Intervals are Wilson's, 95 %.",
    ]
    return "\n".join(lines)
