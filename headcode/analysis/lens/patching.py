"""A layer's codes taken from another sentence: does the output notice, and does it matter whose number goes where?

All codes of one layer of a recipient are replaced by a donor's, and the generated networks work on the recipient's
tokens. Donors have other words, all of them; one is built as the recipient is, the other differs in the order of its
phrases (the minimal pairs of `sentences`). If codes carry structure, the first should disturb less than the second, and
both less than the first one's numbers dealt to other heads. Everything is computed in one pass: at every layer the
patched copies of the sentences find the donors' codes beside their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.analysis.lens.models import Layer, LensModel, distance
from headcode.analysis.lens.sentences import build, last_tokens
from headcode.analysis.lens.separation import interval
from headcode.analysis.patch import other_heads

HEADS_DEALT = "heads dealt"


def patch_layers(
    model: LensModel, recipients: Sequence[Any], donors: Mapping[str, Sequence[Any]], z: float, seed: int
) -> list[dict[str, Any]]:
    """One row per layer and donor: how far the answer moves (`moved`), with an interval over recipients.

    Donors are as long as their recipients. `heads dealt` are the first donors with every code's numbers in an order of
    heads that keeps none in its place, drawn anew for each sentence.
    """
    count, kinds = len(recipients), [*donors, HEADS_DEALT]
    texts = [*recipients, *(text for group in donors.values() for text in group)]
    layers = [i for i in range(model.num_layers) if i not in model.unreadable]
    copies = [(layer, kind, i) for layer in layers for kind in kinds for i in range(count)]
    generator = torch.Generator().manual_seed(seed)
    orders = [other_heads(model.num_heads, generator) for _ in recipients]

    def edit(layer: Layer) -> Tensor | None:
        codes = layer.codes.clone()
        for row, (number, kind, i) in enumerate(copies, start=len(texts)):
            if number == layer.number:
                dealt = kind == HEADS_DEALT
                donor = layer.codes[count * (1 + (0 if dealt else kinds.index(kind))) + i]
                codes[row] = donor[orders[i]] if dealt else donor
        return codes

    batch = model.batch([*texts, *(recipients[i] for _, _, i in copies)])
    answers = model.run(batch, edit=edit, layers=layers, answer=True)
    assert answers is not None
    own = answers[:count]
    moved = distance(answers[len(texts) :], own.repeat(len(layers) * len(kinds), 1), model.predicts)
    table = moved.reshape(len(layers), len(kinds), count).numpy()
    return [
        {"layer": layer, "donor": kind, "moved": _mean(table[i, j], z), "pairs": count}
        | ({} if j == 0 else {"more": _mean(table[i, j] - table[i, 0], z)})
        for i, layer in enumerate(layers)
        for j, kind in enumerate(kinds)
    ]


def patched_sentences(model: LensModel, count: int, seed: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """Recipients and their two kinds of donors, equally long in tokens and without a word in common but "the"."""
    built = build("subject", 8 * count, seed + 1)
    read = [last_tokens(model, sentence.words) for sentence in built]
    limit = min(model.max_length, 64)
    recipients: list[Any] = []
    same: list[Any] = []
    other: list[Any] = []
    for first in range(0, len(built) - 3, 4):
        ids = [each[0] for each in (read[first], read[first + 2], read[first + 3]) if each is not None]
        shared = set(built[first].words) & set(built[first + 2].words) - {"the", "."}
        if len(ids) == 3 and len({len(each) for each in ids}) == 1 and not shared and len(ids[0]) <= limit:
            for group, each in zip((recipients, same, other), ids, strict=True):
                group.append(each)
        if len(recipients) == count:
            break
    return recipients, {"same structure": same, "other structure": other}


def unpatched_distance(model: LensModel, recipients: Sequence[Any], donors: Sequence[Any]) -> float:
    """How far apart the answers to recipients and donors are by themselves: the yardstick for `moved`."""
    answers = model.run(model.batch([*recipients, *donors]), layers=[], answer=True)
    assert answers is not None
    return float(distance(answers[: len(recipients)], answers[len(recipients) :], model.predicts).mean())


def _mean(values: np.ndarray, z: float) -> dict[str, float]:
    return interval(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5), z)
