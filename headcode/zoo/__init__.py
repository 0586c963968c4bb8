"""Small trained models that come with the package: run folders without their optimiser, each with a card.

import headcode
from headcode import zoo

zoo.names()                                  what there is
zoo.card("logic-hyla")                       task, method, steps, seed, scores on every split, the best possible score
model = headcode.load("zoo/logic-hyla")      and wherever a command takes a run: headcode eval zoo/logic-hyla
"""

from pathlib import Path
from typing import Any

from headcode.files import read_object
from headcode.train.checkpoint import ZOO, find_run

CARD_FILE = "card.json"


def names() -> list[str]:
    """The models of the zoo."""
    return sorted(folder.name for folder in ZOO.glob("[!.]*") if (folder / CARD_FILE).is_file())


def folder(name: str) -> Path:
    """The run folder of a model."""
    return find_run(f"zoo/{name}")


def card(name: str) -> dict[str, Any]:
    """What a model was trained on and how well it does."""
    return read_object(folder(name) / CARD_FILE)


__all__ = ["card", "folder", "names"]
