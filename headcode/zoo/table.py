"""The zoo as a Markdown table, put into docs/zoo.md: python -m headcode.zoo.table docs/zoo.md"""

import re
import sys
from pathlib import Path

from headcode.zoo import card, names

_BETWEEN = re.compile(r"(<!-- table: .*? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table() -> str:
    """One line per model, from the cards."""
    lines = [
        "| model | what it is | parameters | steps | seed | iid | compositional | novel | best possible |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names():
        facts = card(name)
        scores = {split: values[facts["metric"]] for split, values in facts["scores"].items()}
        shown = [f"{scores[split]:.3f}" if split in scores else "" for split in ("iid", "compositional", "novel")]
        best = f"{facts['ceiling']['compositional']:.3f}" if "ceiling" in facts else ""
        counts = f"{facts['parameters']:,} | {facts['steps']:,} | {facts['seed']}"
        lines.append(f"| `zoo/{name}` | {facts['about']} | {counts} | {' | '.join(shown)} | {best} |")
    return "\n".join(lines)


def put_into(text: str) -> str:
    """The page with its table up to date."""
    return _BETWEEN.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(put_into(page.read_text(encoding="utf-8")), encoding="utf-8")
