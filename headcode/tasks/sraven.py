"""SRAVEN: symbolic Raven matrices whose features hide behind a permutation in each column.

A puzzle is a grid of panels; a panel shows each feature as one of `num_values` values. Every feature follows one rule
along each row, all modulo the number of values:

    0 constant   1 … 4 progression +1 +2 -1 -2   5 sum   6 difference   7 distribute

On a 3×3 grid the last cell of a row is the sum of the first two, or the first minus the second; distribute has three
distinct values in every row of the feature, each row in its own random order. On a larger grid sum and difference fold
all the earlier cells (first plus, or minus, each of the others), and distribute has `grid` distinct values. With few
values or a 2×2 grid some rules coincide (+2 and -2 modulo 4): they keep their own ids.

Worked example, two features of 8 values with rules (+1, sum), positions swapped in the middle column:

    (3, 1)  (5, 4)  (5, 6)        first feature 3 4 5, second 1 5 6
    (7, 2)  (2, 0)  (1, 4)                      7 0 1         2 2 4
    (0, 6)  (7, 1)  (?, ?)                      0 1 ?         6 7 ?   ->  the answer is (2, 5)

The composition is the multiset of the features' rules; which feature has which rule is drawn at random.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from headcode.tasks.base import NOT_ASKED, AuxiliaryTarget, Batch, Flag, Labels, Outputs, Task, check_instances
from headcode.tasks.compositions import MAX_COMPOSITIONS, check_share, divide, whole_share
from headcode.tasks.sraven_rules import RULE_NAMES, check_rules

# Shares of puzzles are compared with an integer of this many values.
SHARE_STEPS = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class SRaven(Task):
    """Symbolic Raven matrices, (B, grid²·num_features, num_values) one-hot -> (B, num_features) class ids.

    Tokens are the panels row by row, and within a panel the feature positions; the last panel's tokens are zero.
    `info` of a batch: `puzzles` (B, row, column, position) with the answer in the last panel, `rules` (B, feature),
    `permutations` (B, column, position; position j of column c shows feature permutations[c, j]), `token_rules`
    (B, token) the rule behind every token, `composition` (B,) the row of `compositions`, `aligned` (B,) whether the
    columns share one permutation, `instance` (B,).

    >>> task = SRaven()
    >>> {split: len(ids) for split, ids in task.split_compositions.items()}
    {'train': 248, 'iid': 248, 'compositional': 82}
    >>> batch = task.sample("train", 0, 128)
    >>> batch.x.shape, batch.y.shape
    (torch.Size([128, 36, 8]), torch.Size([128, 4]))
    """

    name: ClassVar[str] = "sraven"
    task_id: ClassVar[int] = 2
    version: ClassVar[int] = 1
    newer_fields: ClassVar[tuple[str, ...]] = ("blank",)
    objective: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "accuracy"
    view: ClassVar[str] = "puzzle"
    labels: ClassVar[tuple[str, ...]] = ("composition", "rules", "token_rules", "permutations", "aligned", "puzzles")
    label_kind: ClassVar[str] = "rule"
    flags: ClassVar[Mapping[str, Flag]] = {
        "held_out": Flag(float, "0..1", "Share of the compositions that is held out."),
        "num_features": Flag(int, "N", "SRAVEN: features of a panel."),
        "num_values": Flag(int, "N", "SRAVEN: values of a feature."),
        "grid": Flag(int, "N", "SRAVEN: rows and columns."),
        "permute": Flag(bool, "{True,False}", "SRAVEN: whether each column hides the features behind a permutation."),
        "rules": Flag(tuple[int, ...], "ID …", "SRAVEN: the rule ids in use."),
        "aligned": Flag(float, "0..1", "SRAVEN: share of training puzzles whose columns share one permutation."),
        "blank": Flag(float, "NUMBER", "SRAVEN: how many features of a training puzzle are left out on average."),
    }

    num_features: int = 4
    """Features of a panel, 1 to 12."""
    num_values: int = 8
    """Values of a feature, 2 to 128."""
    grid: int = 3
    """Rows and columns, 2 to 12."""
    held_out: float = 0.25
    """Share of the rule multisets that is held out as `compositional`."""
    permute: bool = True
    """Whether each column hides the features behind a permutation of its own."""
    aligned: float | tuple[tuple[float, ...], ...] = 0.0
    """Share of training puzzles whose columns share one permutation: a number, or a curriculum of knots
    (instance number, share) with straight lines between them and the end shares beyond. Only `train` is aligned."""
    blank: float | tuple[tuple[float, ...], ...] = 0.0
    """How many features of a training puzzle are left out on average (no value in any panel, and not asked for), below
    num_features: a number or knots, as `aligned`. One feature is always shown, each other one is left out with the same
    probability: with 4 features, 3 leaves one alone, and 1.5 shows 1, 2, 3 or 4 of them, mostly 2 or 3."""
    rules: tuple[int, ...] | None = None
    """The rule ids in use; None means all eight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (("num_features", 1, 12), ("num_values", 2, 128), ("grid", 2, 12)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie in {least}..{most}, got {getattr(self, name)}.")
        check_rules(self.rules, self.num_values, self.grid)
        check_share("held_out", self.held_out)
        for share in (knot[-1] for knot in self._knots("aligned")):
            check_share("aligned", share)
        for number in (knot[-1] for knot in self._knots("blank")):
            if not 0 <= number <= self.num_features - 1:
                raise ValueError(f"blank must lie in 0..{self.num_features - 1}, got {number}.")
        if self.aligned != 0.0 and not self.permute:
            raise ValueError("aligned says how columns share a permutation, and permute=False has none: use aligned=0.")
        if (count := math.comb(self.num_features + len(self.rule_ids) - 1, self.num_features)) > MAX_COMPOSITIONS:
            raise ValueError(f"There are {count:,} rule multisets, more than {MAX_COMPOSITIONS:,}: use fewer features.")
        _ = self.split_compositions  # a division that cannot be made is said here, not at the first sample

    @property
    def rule_ids(self) -> tuple[int, ...]:
        """The rules in use, ascending."""
        return tuple(range(len(RULE_NAMES))) if self.rules is None else tuple(sorted(self.rules))

    @functools.cached_property
    def compositions(self) -> np.ndarray:
        """All multisets of rules, (composition, feature) ids, ascending within a row and row by row."""
        multisets = itertools.combinations_with_replacement(self.rule_ids, self.num_features)
        return np.array(list(multisets), dtype=np.int64)

    @functools.cached_property
    def split_compositions(self) -> dict[str, np.ndarray]:
        count = len(self.compositions)
        num_held_out = whole_share(self.held_out, count)
        if num_held_out == count:
            raise ValueError(f"held_out={self.held_out} leaves no composition to train on: use a smaller share.")
        if self.held_out > 0 and num_held_out == 0:
            raise ValueError(
                f"held_out={self.held_out} of {count} compositions holds out none: use a larger share, or 0."
            )
        parts = np.array(self.rule_ids)
        held_out = divide(
            self._stream("split"), self.compositions, parts, num_held_out, part="rule", cover_held_out=True
        )
        splits = {"train": np.flatnonzero(~held_out), "iid": np.flatnonzero(~held_out)}
        if num_held_out:
            splits["compositional"] = np.flatnonzero(held_out)
        return splits

    @property
    def input_dim(self) -> int:
        return self.num_values

    @property
    def output_dim(self) -> int:
        return self.num_values

    @property
    def sequence_length(self) -> int:
        return self.grid**2 * self.num_features

    @property
    def period(self) -> int:
        return self.grid * self.num_features

    @property
    def queries(self) -> slice:
        return slice(-self.num_features, None)

    @property
    def auxiliary(self) -> tuple[AuxiliaryTarget, ...]:
        """Before the last layer: which rule does a token's feature follow, and at which position does each column show
        it? On a 3×3 grid, before the last two layers, put to the last panel of each whole row: of which pairs (first
        panel, second panel) is a cell the sum, of which the difference?"""
        kinds = [
            AuxiliaryTarget("rule", 1, 1, len(RULE_NAMES), 1.0),
            AuxiliaryTarget("places", 1, self.grid, self.num_features, 1.0),
        ]
        if self.grid == 3:
            kinds.append(AuxiliaryTarget("sums", 2, 2 * self.num_features**2, 2, 8.0))
        return tuple(kinds)

    def auxiliary_targets(self, batch: Batch) -> list[Tensor]:
        permutations = batch.info["permutations"]  # (B, column, position) -> feature
        cells = batch.info["puzzles"]
        count, grid, _ = permutations.shape
        feature = permutations.flatten(1)  # of the tokens of one row
        place_of = permutations.argsort(-1)  # (B, column, feature) -> position
        places = place_of.gather(2, feature[:, None].expand(-1, grid, -1)).transpose(
            1, 2
        )  # (B, token of a row, column)
        shown = cells[:, 0].reshape(count, -1, 1) >= 0
        rule = batch.info["token_rules"][:, : feature.shape[1], None]
        targets = [
            torch.where(shown, rule, NOT_ASKED).repeat(1, grid, 1),
            torch.where(shown, places, NOT_ASKED).repeat(1, grid, 1),
        ]
        if grid == 3:
            targets.append(self._sums(cells))
        return targets

    def _sums(self, cells: Tensor) -> Tensor:
        """Whether the last cell of a whole row is the sum, or the difference, of each pair of earlier ones."""
        first, second, last = cells[:, :-1].long().unbind(2)  # (B, row, position) of each panel
        first, second, last = first[:, :, None, :, None], second[:, :, None, None, :], last[..., None, None]
        off_by = torch.stack([first + second - last, first - second - last], -1)  # (B, row, last, first, second, sign)
        known = (first >= 0) & (second >= 0) & (last >= 0)
        found = torch.where(known[..., None], (off_by % self.num_values == 0).long(), NOT_ASKED)
        answers = torch.full((*cells.shape, 2 * self.num_features**2), NOT_ASKED)
        answers[:, :-1, 2] = found.flatten(3)
        return answers.flatten(1, 3)

    def curriculum(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """The value of `aligned` or `blank` at each instance number of the training split.

        >>> SRaven(aligned=[(0, 1.0), (1000, 0.0)]).curriculum("aligned", np.array([0, 250, 5000])).tolist()
        [1.0, 0.75, 0.0]
        """
        knots = self._knots(name)
        share = np.full(len(numbers), knots[-1][1])
        at = numbers.astype(np.float64)
        # Single array operations: each is rounded alike everywhere, where one compiled formula may fuse them.
        for (left, low), (right, high) in reversed(list(itertools.pairwise(knots))):
            between = low + (high - low) * ((at - left) / (right - left))
            share = np.where(at < right, between, share)
        return np.where(at < knots[0][0], knots[0][1], share)

    def encode(self, puzzles: np.ndarray | Tensor) -> Tensor:
        """One-hot tokens of puzzles (N, row, column, position), the last panel zero: what a model takes as x."""
        from headcode.tasks import _sraven_kernels as kernels

        cells = np.ascontiguousarray(puzzles)
        shape = (self.grid, self.grid, self.num_features)
        if cells.ndim != 4 or cells.shape[1:] != shape or cells.dtype.kind not in "iu":
            expected = f"(N, {', '.join(map(str, shape))})"
            raise ValueError(
                f"This task's puzzles are whole numbers of shape {expected}, got {cells.dtype} {cells.shape}."
            )
        visible = cells.reshape(len(cells), -1, self.num_features)[:, :-1]
        if visible.size and not (visible.min() >= 0 and visible.max() < self.num_values):
            raise ValueError(f"The visible cells must lie in 0..{self.num_values - 1}.")
        x = np.zeros((len(cells), self.sequence_length, self.num_values), dtype=np.float32)
        kernels.encode(cells, x)
        return torch.from_numpy(x)

    def raw(self, split: str, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Puzzles, rules, permutations, composition and aligned as NumPy arrays, without the tokens: the fast core."""
        from headcode.tasks import _sraven_kernels as kernels

        ids, multisets, bounds = self._recipes[self._checked_split(split)]
        numbers = check_instances(numbers)
        integers = self._stream(split).integers(numbers, bounds)
        aligned = np.full(len(numbers), not self.permute)
        if self.permute and split == "train" and self.aligned != 0.0:
            aligned = integers[:, 2] < self.curriculum("aligned", numbers) * SHARE_STEPS
        size = (len(numbers), self.grid, self.num_features)
        puzzles = np.empty((size[0], self.grid, *size[1:]), dtype=np.int8)
        rules = np.empty((size[0], self.num_features), dtype=np.int64)
        permutations = np.empty(size, dtype=np.int64)
        shown = np.full(len(numbers), self.num_features)
        if self.blank != 0.0 and split == "train":
            shown -= self._number_blank(self.curriculum("blank", numbers), integers[:, -1])
        kernels.build(integers, multisets, aligned, shown, self.permute, self.num_values, puzzles, rules, permutations)
        return {
            "puzzles": puzzles,
            "rules": rules,
            "permutations": permutations,
            "composition": ids[integers[:, 0]],
            "aligned": aligned,
        }

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        from headcode.tasks import _sraven_kernels as kernels

        arrays = self.raw(split, numbers)
        puzzles = arrays["puzzles"]
        x = np.zeros((len(numbers), self.sequence_length, self.num_values), dtype=np.float32)
        kernels.encode(puzzles, x)
        token_rules = np.empty((len(numbers), self.sequence_length), dtype=np.int64)
        kernels.label_tokens(arrays["rules"], arrays["permutations"], token_rules)
        info = {name: torch.from_numpy(array) for name, array in arrays.items()}
        info |= {"token_rules": torch.from_numpy(token_rules), "instance": torch.from_numpy(numbers)}
        answers = puzzles[:, -1, -1].astype(np.int64)
        return Batch(torch.from_numpy(x), torch.from_numpy(np.where(answers < 0, NOT_ASKED, answers)), info)

    def _number_blank(self, mean: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """How many features are left out: binomial with this mean, by draws below SHARE_STEPS."""
        others = self.num_features - 1
        share = mean / max(others, 1)
        number, below = np.zeros(len(mean), dtype=np.int64), np.zeros(len(mean))
        for count in range(others):
            chance = np.full(len(mean), float(math.comb(others, count)))
            for factor in [share] * count + [1.0 - share] * (others - count):
                chance = chance * factor  # one by one, as in `curriculum`
            below = below + chance
            number += draws >= below * SHARE_STEPS
        return number

    @functools.cached_property
    def _recipes(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each split the ids of its compositions, their rules, and the bounds of an instance's draws."""
        return {
            split: (ids, self.compositions[ids], np.array(self._bounds(len(ids))))
            for split, ids in self.split_compositions.items()
        }

    def _bounds(self, num_compositions: int) -> list[int]:
        """Bounds of an instance's draws: composition, rule order, aligned, one permutation per column; then per feature
        the free values of each row, the picks of distribute's set, and its order in each row; at last one for blank."""
        orders = math.factorial(self.num_features)
        picks = [max(self.num_values - k, 1) for k in range(self.grid)]
        feature = [self.num_values] * (self.grid * (self.grid - 1)) + picks + [math.factorial(self.grid)] * self.grid
        return (
            [num_compositions, orders, SHARE_STEPS] + [orders] * self.grid + feature * self.num_features + [SHARE_STEPS]
        )

    def _knots(self, name: str) -> tuple[tuple[float, ...], ...]:
        knots = getattr(self, name)
        if isinstance(knots, float):
            return ((0.0, knots),)
        if not knots or any(len(knot) != 2 for knot in knots):
            raise ValueError(f"{name} is a number or a list of (instance, number) knots, got {knots}.")
        if any(right[0] <= left[0] for left, right in itertools.pairwise(knots)):
            raise ValueError(f"The knots of {name} must have rising instance numbers, got {[k[0] for k in knots]}.")
        return knots

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        """Sums for `accuracy` (all features right) from logits (B, feature, value) or class ids (B, feature)."""
        y = batch.y.cpu()
        guess = prediction.detach().cpu()
        if guess.shape == (*y.shape, self.num_values):
            guess = guess.argmax(-1)
        if guess.shape != y.shape:
            raise ValueError(
                f"score takes logits {(*y.shape, self.num_values)} or class ids {tuple(y.shape)}, "
                f"got shape {tuple(prediction.shape)}."
            )
        right = (guess == y) | (y == NOT_ASKED)
        return {"count": float(len(y)), "all_right": float(right.all(1).sum()), "features_right": float(right.sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`accuracy`: all features right; `feature_accuracy`: the mean over features."""
        count = sums["count"]
        return {
            "accuracy": sums["all_right"] / count,
            "feature_accuracy": sums["features_right"] / (count * self.num_features),
        }

    def ceiling(self, split: str, size: int) -> float | None:
        """The exact solver's accuracy; None for a setting or a split that it does not cover."""
        from headcode.tasks import oracle

        try:
            return float(oracle.solve_split(self, split, self.raw(split, np.arange(size))["puzzles"]).ceiling)
        except ValueError:
            return None

    def decodable(self, codes: Mapping[str, Any]) -> Labels:
        """The rule behind each hidden token."""
        rules = np.asarray(codes["token_rules"])[:, np.asarray(codes["queries"])]
        return Labels(rules, np.array(self.rule_ids), False)

    @classmethod
    def label_name(cls, label: int) -> str:
        return RULE_NAMES[label] if 0 <= label < len(RULE_NAMES) else str(label)

    def map_labels(self, codes: Mapping[str, Any], query: int) -> dict[str, np.ndarray]:
        named = {"rule": np.asarray(codes["token_rules"])[:, query]}
        feature = query - (self.sequence_length - self.num_features)
        return named if feature < 0 else {**named, "target": np.asarray(codes["targets"])[:, feature]}

    def patch_pairs(
        self, split: str, size: int, seed: int, outputs: Outputs
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        from headcode.tasks import _sraven_pairs as pairs

        yield "rule_changed", pairs.rewritten(self, split, size, seed, outputs)
        for kind in ("other_rule", "same_rule"):
            yield kind, pairs.sampled(self, split, size, kind, seed, outputs)

    def as_authors(self) -> tuple[Task, dict[str, Any]]:
        last = self.sequence_length - 1
        others = [last - distance * self.num_features for distance in range(self.grid - 1, 0, -1)]
        return self.replace(permute=False, aligned=0.0), {"queries": [last], "keys": others}

    def as_text(self, batch: Batch, answer: bool = False, colour: bool = False) -> str:
        from headcode.tasks import render

        return render.puzzle_text(batch.info["puzzles"][0].numpy(), answer, colour)

    def remarks(self, batch: Batch, split: str, answer: bool = False) -> list[str]:
        from headcode.tasks import oracle

        return oracle.remarks(self, batch, split, answer)

    def draw(self, batch: Batch, title: str, answer: bool = False, variables: tuple[int, int] | None = None) -> Any:
        from headcode.tasks import render

        caption = "In each column the attributes may have swapped roles." if self.permute else None
        puzzle = batch.info["puzzles"][0].numpy()
        return render.draw_puzzle(puzzle, self.num_values, answer, f"SRAVEN · {title}", caption)
