"""Code patching: is the structure of the codes used, and not only present?

`patch` puts the codes of one instance's answer into another's forward pass and asks whether the answer follows: the
value networks are then configured as for the donor, and work on the recipient's tokens.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headcode.analysis.runs import OpenRun, Tell, check_layers, check_split, open_run, predict, tell_nobody
from headcode.nn import capture_codes, edit_codes
from headcode.nn.edit import Edit
from headcode.tasks import Batch
from headcode.tasks.intervals import wilson_interval


def patch(
    path: str | Path,
    *,
    checkpoint: str = "last",
    layers: Sequence[int] | None = None,
    keys: str = "all",
    split: str = "compositional",
    size: int = 2048,
    inputs: str | None = None,
    seed: int = 0,
    batch_size: int = 256,
    progress: Tell = tell_nobody,
) -> list[dict[str, Any]]:
    """Codes of a donor in a recipient's forward pass: whom does the answer follow?

    SRAVEN: the codes of one answering token (`keys`: to all keys, or to itself alone) come from a puzzle with the same
    permutations. Donors: `rule_changed` is the recipient's own puzzle with the first rows of that feature rewritten to
    another rule, so that nothing but the rule differs; `other_rule` and `same_rule` are other puzzles of the split,
    where the token has another rule or the same. `follows` is the share of answers that are the donor's rule applied to
    the recipient's last row; `stays` the share that are the recipient's own; `copies` the donor's answer (the same as
    `follows` for `rule_changed`). Recipients and donors are puzzles that the model solves and whose last rows tell
    these answers apart; `distribute`, which a row alone does not determine, is left out. Fuzzy logic (`other_terms`):
    the donor has the same points and other terms; `follows` is the share of answers that are closer to the donor's
    function than to the recipient's own.

    Controls: `none` (no patch: how often the answer agrees by itself) and `shuffled` (the donor's code with each head's
    part given to another head, drawn anew for each pair: the same numbers, another configuration). Rows: one per layer
    and control, and `all` layers together.
    """
    run = open_run(path, checkpoint, inputs=inputs)
    check_split(run.task, split)
    if size < 2:
        raise ValueError(f"Patching needs at least 2 instances, got size {size}.")
    if keys not in ("all", "self"):
        raise ValueError(f"keys must be all or self, got {keys!r}.")
    numbers = check_layers(layers, run.config.model.attention_layers)
    places: list[list[int]] = [[layer] for layer in numbers]
    if len(numbers) > 1:
        places.append(numbers)
    rows: list[dict[str, Any]] = []
    for kind, pairs in run.task.patch_pairs(split, size, seed, functools.partial(_outputs, run)):
        if not len(pairs["token"]):
            continue
        for control in ("none", "shuffled", "patched"):
            for chosen in places if control != "none" else places[:1]:
                where: int | str = "all" if len(chosen) > 1 else chosen[0]
                where = "none" if control == "none" else where
                progress(f"{kind}, {control}" + ("" if control == "none" else f", layer {where}"), len(rows), None)
                answers = _patched_answers(run, pairs, chosen, keys, control, seed, batch_size)
                found = _follow(run, pairs, answers)
                rows.append({"donor": kind, "control": control, "layer": where, "keys": keys, **found})
    if not rows:
        raise ValueError(f"Among {size} instances no pair was found that the model solves; use more, or train longer.")
    return rows


def _patched_answers(
    run: OpenRun, pairs: dict[str, Any], layers: list[int], keys: str, control: str, seed: int, batch_size: int
) -> Tensor:
    """The outputs (N, output_dim) for the patched token of each recipient."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.tensor(list(range(run.task.sequence_length))[run.task.queries])
    outputs = []
    for first in range(0, len(pairs["token"]), batch_size):
        part = slice(first, first + batch_size)
        token, recipient, donor = (pairs[name][part] for name in ("token", "recipient", "donor"))
        with capture_codes(run.model, layers=layers, queries=places.tolist()) as donated:
            _outputs(run, donor)
        if control == "none":
            output = _outputs(run, recipient)
        else:
            rows, heads = torch.arange(len(token)), run.config.model.num_heads
            order = torch.arange(heads).expand(len(token), -1)
            if control == "shuffled":
                order = torch.stack([other_heads(heads, generator) for _ in rows])
            given = {layer: codes[rows[:, None], order, token[:, None]] for layer, codes in donated.items()}
            with edit_codes(run.model, _swap(given, places[token], keys, run.task.sequence_length), layers=layers):
                output = _outputs(run, recipient)
        outputs.append(output[torch.arange(len(token)), token])
    return torch.cat(outputs)


def other_heads(count: int, generator: torch.Generator) -> Tensor:
    """A random order of the heads in which none keeps its place: one cycle through all of them."""
    cycle = torch.randperm(count, generator=generator)
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order


def _swap(given: dict[int, Tensor], at: Tensor, keys: str, length: int) -> Edit:
    """An edit that puts codes (B, H, Tk) in place of those of each instance's query at position `at`."""

    def edit(layer: int, codes: Tensor) -> Tensor:
        codes, batch = codes.clone(), torch.arange(len(codes))
        rows = at - (length - codes.shape[2])
        if keys == "all":
            codes[batch, :, rows] = given[layer]
        else:
            codes[batch, :, rows, at] = given[layer][batch, :, at]
        return codes

    return edit


def _outputs(run: OpenRun, x: Tensor) -> Tensor:
    return predict(run, Batch(x, x, {}))


def _follow(run: OpenRun, pairs: dict[str, Any], outputs: Tensor) -> dict[str, Any]:
    """Shares of answers that follow the donor's code, stay, or copy, with a 95 % interval for the first."""
    if run.task.objective == "classification":
        answers = outputs.argmax(-1)
        follows = answers == pairs["donors"]
        stays, copies = answers == pairs["own"], answers == pairs["copy"]
    else:
        answers = outputs[:, 0]
        follows = (answers - pairs["donors"]).abs() < (answers - pairs["own"]).abs()
        stays, copies = ~follows, torch.zeros_like(follows)
    share, count = float(follows.double().mean()), len(answers)
    low, high = wilson_interval(share, count)
    return {
        "follows": share,
        "follows_low": low,
        "follows_high": high,
        "stays": float(stays.double().mean()),
        "copies": float(copies.double().mean()),
        "pairs": count,
    }
