"""In-context regression on fuzzy-logic functions.

A function is an *or* of `num_terms` terms; a term is a full conjunction: an *and* over all variables, each as it is or
negated. There are 2**num_variables terms, numbered by their literals read as binary digits (1 = as it is, 0 = negated,
first variable first). A composition is a set of distinct terms. In Zadeh's logic not x = 1-x, and = min, or = max.

Worked example, three variables, terms 5 = (1, 0, 1) and 3 = (0, 1, 1):

    f(x) = (x1 and not x2 and x3) or (not x1 and x2 and x3)
    f(0.9, 0.2, 0.7) = max(min(0.9, 0.8, 0.7), min(0.1, 0.2, 0.7)) = 0.7

A sequence is `num_points` tokens [x1 … xV, f(x)]; the last token's f is hidden (0) and is the target y.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from headcode.tasks.base import Batch, Flag, Labels, Outputs, Task
from headcode.tasks.compositions import MAX_COMPOSITIONS, check_share, divide, whole_share
from headcode.tasks.streams import bounded, unit_floats

MOST_POINTS = 2**20
SOLVED_R2 = 0.95
"""An answer counts as right from this R² of its own sequence on."""
LEAST_DIFFERENCE = 0.1
"""Recipients and donors of a patch whose right answers are closer cannot tell whom the answer follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FuzzyLogic(Task):
    """Fuzzy-logic functions in context, (B, num_points, num_variables + 1) -> (B, 1).

    `info` of a batch: `terms` (B, term, variable; 1 = as it is, 0 = negated), `term_ids` (B, term; ascending),
    `composition` (B,) the row of `compositions`, `targets` (B, point) all values of f, `instance` (B,).

    >>> task = FuzzyLogic()
    >>> {split: len(ids) for split, ids in task.split_compositions.items()}
    {'train': 20, 'iid': 20, 'compositional': 46, 'novel': 6}
    >>> batch = task.sample("train", 0, 128)
    >>> batch.x.shape, batch.y.shape
    (torch.Size([128, 32, 5]), torch.Size([128, 1]))
    """

    name: ClassVar[str] = "logic"
    task_id: ClassVar[int] = 1
    version: ClassVar[int] = 1
    objective: ClassVar[str] = "regression"
    main_metric: ClassVar[str] = "r2"
    view: ClassVar[str] = "function"
    labels: ClassVar[tuple[str, ...]] = ("composition", "term_ids", "terms")
    label_kind: ClassVar[str] = "term"
    decoding_inputs: ClassVar[str | None] = "fixed_context"
    flags: ClassVar[Mapping[str, Flag]] = {
        "held_out": Flag(float, "0..1", "Share of the compositions that is held out."),
        "num_variables": Flag(int, "N", "Fuzzy logic: variables of the function."),
        "num_terms": Flag(int, "N", "Fuzzy logic: terms of the function."),
        "num_points": Flag(int, "N", "Fuzzy logic: points of a sequence."),
        "novel": Flag(float, "0..1", "Fuzzy logic: share of the terms that is never trained on."),
        "t_norm": Flag(
            Literal["zadeh", "product"],
            "{zadeh,product}",
            "Fuzzy logic: min and max, or product and probabilistic sum.",
        ),
        "inputs": Flag(
            Literal["uniform", "fixed_context", "fixed_query"],
            "{uniform,fixed_context,fixed_query}",
            "Fuzzy logic: which points all sequences share.",
        ),
        "authors_novel_terms": Flag(
            bool, "{True,False}", "Fuzzy logic: the last terms are the novel ones, as the authors have it."
        ),
    }

    num_variables: int = 4
    """Variables of the function; there are 2**num_variables terms."""
    num_terms: int = 2
    """Distinct terms in one function."""
    num_points: int = 32
    """Points of a sequence, the hidden one included."""
    held_out: float = 0.7
    """Share of the compositions of seen terms that is held out as `compositional`."""
    novel: float = 0.25
    """Share of the terms that no training function has; sets of them are the split `novel`."""
    t_norm: Literal["zadeh", "product"] = "zadeh"
    """`zadeh`: and = min, or = max. `product`: and = a·b, or = a + b - a·b."""
    inputs: Literal["uniform", "fixed_context", "fixed_query"] = "uniform"
    """`fixed_context`: all sequences share their points but the last; `fixed_query`: they share the last point."""
    authors_novel_terms: bool = False
    """Take the last terms as the novel ones, as the authors do, instead of drawing them by the seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("num_variables", 1), ("num_terms", 1), ("num_points", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}.")
        if self.num_points > MOST_POINTS:
            raise ValueError(f"num_points must be at most {MOST_POINTS:,}, got {self.num_points:,}.")
        if self.num_variables > 16:
            raise ValueError(f"num_variables must be at most 16 (65,536 terms), got {self.num_variables}.")
        if self.num_terms > 2**self.num_variables:
            raise ValueError(
                f"num_terms={self.num_terms} distinct terms do not exist: {self.num_variables} variables "
                f"have {2**self.num_variables} terms."
            )
        if math.comb(2**self.num_variables, self.num_terms) > MAX_COMPOSITIONS:
            raise ValueError(
                f"num_variables={self.num_variables} and num_terms={self.num_terms} have too many compositions; "
                f"at most {MAX_COMPOSITIONS:,} are supported: use fewer variables or terms."
            )
        check_share("held_out", self.held_out)
        check_share("novel", self.novel)
        _ = self.split_compositions  # a division that cannot be made is said here, not at the first sample

    @functools.cached_property
    def compositions(self) -> np.ndarray:
        """All sets of terms, (composition, term) ids, ascending within a row and row by row."""
        sets = itertools.combinations(range(2**self.num_variables), self.num_terms)
        flat = np.fromiter(itertools.chain.from_iterable(sets), dtype=np.int64)
        return flat.reshape(-1, self.num_terms)

    @functools.cached_property
    def novel_terms(self) -> np.ndarray:
        """The ids of the terms that are kept for the split `novel`."""
        count = 2**self.num_variables
        num_novel = whole_share(self.novel, count)
        if self.authors_novel_terms:
            return np.arange(count - num_novel, count)
        return np.sort(self._stream("parts").order(0, count)[:num_novel])

    @functools.cached_property
    def split_compositions(self) -> dict[str, np.ndarray]:
        is_novel = np.zeros(2**self.num_variables, dtype=bool)
        is_novel[self.novel_terms] = True
        if self.novel > 0 and is_novel.sum() < self.num_terms:
            raise ValueError(
                f"novel={self.novel} keeps {is_novel.sum()} of {len(is_novel)} terms aside, fewer than "
                f"num_terms={self.num_terms}: use a larger novel, or 0 for no such split."
            )
        members = is_novel[self.compositions]  # (composition, term)
        seen = np.flatnonzero(~members.any(axis=1))
        num_held_out = whole_share(self.held_out, len(seen))
        if len(seen) - num_held_out < 1:
            raise ValueError(
                f"held_out={self.held_out} and novel={self.novel} leave no composition to train on: use smaller shares."
            )
        if self.held_out > 0 and num_held_out == 0:
            raise ValueError(
                f"held_out={self.held_out} of {len(seen)} compositions holds out none: use a larger share, or 0."
            )
        held_out = divide(
            self._stream("split"),
            self.compositions[seen],
            np.flatnonzero(~is_novel),
            num_held_out,
            part="seen term",
            cover_held_out=False,
        )
        splits = {"train": seen[~held_out], "iid": seen[~held_out]}
        if num_held_out:
            splits["compositional"] = seen[held_out]
        if self.novel > 0:
            splits["novel"] = np.flatnonzero(members.all(axis=1))
        return splits

    @property
    def input_dim(self) -> int:
        return self.num_variables + 1

    @property
    def output_dim(self) -> int:
        return 1

    @property
    def sequence_length(self) -> int:
        return self.num_points

    @property
    def queries(self) -> slice:
        return slice(-1, None)

    def term_bits(self, ids: np.ndarray) -> np.ndarray:
        """Literals of terms, (…, variable): 1 = the variable as it is, 0 = its negation."""
        shifts = np.arange(self.num_variables - 1, -1, -1)
        return np.asarray(ids)[..., None] >> shifts & 1

    @staticmethod
    def evaluate(terms: Any, inputs: Any, t_norm: str = "zadeh") -> Any:
        """The function's values: terms (…, term, variable) and inputs (…, point, variable) -> (…, point).

        NumPy arrays give a NumPy array and torch tensors a tensor, of the inputs' dtype (and differentiable).

        >>> FuzzyLogic.evaluate(np.array([[1, 0, 1], [0, 1, 1]]), np.array([[0.9, 0.2, 0.7]]))
        array([0.7])
        """
        if t_norm not in ("zadeh", "product"):
            raise ValueError(f"t_norm must be 'zadeh' or 'product', got {t_norm!r}.")
        library: Any = torch if isinstance(inputs, Tensor) else np
        inputs = inputs if isinstance(inputs, Tensor) else np.asarray(inputs)
        terms = torch.as_tensor(terms, device=inputs.device) if isinstance(inputs, Tensor) else np.asarray(terms)
        if terms.ndim < 2 or inputs.ndim < 2 or terms.shape[-1] != inputs.shape[-1]:
            raise ValueError(
                "evaluate takes terms (…, term, variable) and inputs (…, point, variable) with the same variables, "
                f"got shapes {tuple(terms.shape)} and {tuple(inputs.shape)}."
            )
        if 0 in terms.shape[-2:]:
            raise ValueError(f"evaluate needs at least one term and one variable, got terms {tuple(terms.shape)}.")
        negated = 1 - inputs
        value = None
        # One operation at a time in a fixed order, so that every machine rounds alike.
        for term in range(terms.shape[-2]):
            conjunction = None
            for variable in range(terms.shape[-1]):
                positive = (terms[..., term, variable] != 0)[..., None]
                literal = library.where(positive, inputs[..., variable], negated[..., variable])
                if conjunction is None:
                    conjunction = literal
                elif t_norm == "zadeh":
                    conjunction = library.minimum(conjunction, literal)
                else:
                    conjunction = conjunction * literal
            if value is None:
                value = conjunction
            elif t_norm == "zadeh":
                value = library.maximum(value, conjunction)
            else:
                value = value + conjunction - value * conjunction
        return value

    def _make(self, split: str, numbers: np.ndarray) -> Batch:
        ids = self.split_compositions[split]
        num_words = self.num_points * self.num_variables
        shape = (self.num_points, self.num_variables)
        words = self._stream(split).words(numbers, 2 + num_words)
        composition = ids[bounded(words[:, :2], [len(ids)])[:, 0]]
        inputs = unit_floats(words[:, 2:]).reshape(-1, *shape)
        if self.inputs != "uniform":
            fixed = unit_floats(self._stream("fixed").words([0], num_words)).reshape(shape)
            points = slice(None, -1) if self.inputs == "fixed_context" else slice(-1, None)
            inputs[:, points] = fixed[points]
        term_ids = self.compositions[composition]
        terms = self.term_bits(term_ids)
        targets = self.evaluate(terms, inputs, self.t_norm)  # (B, point) float32
        x = np.concatenate([inputs, targets[..., None]], axis=-1)
        x[:, -1, -1] = 0
        info = {
            "terms": torch.from_numpy(terms),
            "term_ids": torch.from_numpy(term_ids),
            "composition": torch.from_numpy(composition),
            "targets": torch.from_numpy(targets),
            "instance": torch.from_numpy(numbers),
        }
        return Batch(torch.from_numpy(x), torch.from_numpy(targets[:, -1:].copy()), info)

    def score(self, prediction: Tensor, batch: Batch) -> dict[str, float]:
        """Sums for `r2`: per sequence 1 - squared error / variance of that sequence's targets, and for `pooled_r2`.

        A sequence whose targets are all equal has no variance to explain: it is left out of `r2` and counted.
        """
        if prediction.numel() != batch.y.numel():
            raise ValueError(
                f"score takes one prediction per sequence, {len(batch.y)} here, got shape {tuple(prediction.shape)}."
            )
        y = batch.y.cpu().double()
        error = (prediction.detach().cpu().double().reshape(y.shape) - y).square()  # (B, 1)
        variance = batch.info["targets"].cpu().double().var(dim=1, correction=0).unsqueeze(1)
        varied = variance > 0
        return {
            "count": float(len(y)),
            "constant": float((~varied).sum()),
            "r2": (1 - error[varied] / variance[varied]).sum().item(),
            "squared_error": error.sum().item(),
            "target": y.sum().item(),
            "target_squared": y.square().sum().item(),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`r2` (the mean over sequences), `pooled_r2` (all hidden values together) and `mse`."""
        count = sums["count"]
        spread = sums["target_squared"] - sums["target"] ** 2 / count
        return {
            "r2": sums["r2"] / varied if (varied := count - sums["constant"]) else math.nan,
            "pooled_r2": 1 - sums["squared_error"] / spread if spread > 0 else math.nan,
            "mse": sums["squared_error"] / count,
        }

    def judge(self, prediction: Tensor, batch: Batch) -> dict[str, np.ndarray]:
        """`r2` of each sequence; an answer is right from `SOLVED_R2` on."""
        values = prediction.reshape(batch.y.shape)
        error = (values.double() - batch.y.double()).square().squeeze(1)
        variance = batch.info["targets"].double().var(dim=1, correction=0)
        score = (1 - error / variance).numpy()
        return {
            "predictions": values.numpy(),
            "targets": batch.y.numpy(),
            "r2": score.astype(np.float32),
            "correct": score >= SOLVED_R2,
        }

    def decodable(self, codes: Mapping[str, Any]) -> Labels:
        """Which terms the function has. Terms that training never saw cannot be decoded by anything trained on it."""
        classes = np.unique(self.compositions[self.split_compositions["train"]])
        return Labels((np.asarray(codes["term_ids"])[:, :, None] == classes).any(1), classes, True)

    def map_labels(self, codes: Mapping[str, Any], query: int) -> dict[str, np.ndarray]:
        return {
            "target": np.asarray(codes["targets"])[:, 0],
            "term": np.asarray(codes["term_ids"])[:, 0],
            "composition": np.asarray(codes["composition"]),
        }

    def as_authors(self) -> tuple[Task, dict[str, Any]]:
        return self.replace(inputs="fixed_query"), {"queries": [self.sequence_length - 1], "keys": "self"}

    def patch_pairs(
        self, split: str, size: int, seed: int, outputs: Outputs
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """`other_terms`: every recipient gets the same points with the terms of its neighbour in the stream."""
        batch = self.instances(split, np.arange(size))
        terms = batch.info["terms"].roll(1, 0)
        targets = self.evaluate(terms, batch.x[..., :-1], self.t_norm)
        x = torch.cat([batch.x[..., :-1], targets[..., None]], -1)
        x[:, -1, -1] = 0
        own, theirs = batch.y[:, 0], targets[:, -1]
        apart = (own - theirs).abs() >= LEAST_DIFFERENCE
        yield (
            "other_terms",
            {
                "recipient": batch.x[apart],
                "donor": x[apart],
                "token": torch.zeros(int(apart.sum()), dtype=torch.long),
                "own": own[apart],
                "donors": theirs[apart],
            },
        )

    def as_text(self, batch: Batch, answer: bool = False, colour: bool = False) -> str:
        from headcode.tasks import render

        terms, target = batch.info["terms"][0].numpy(), float(batch.info["targets"][0, -1])
        return render.function_text(terms, batch.x[0].numpy(), answer, target)

    def draw(self, batch: Batch, title: str, answer: bool = False, variables: tuple[int, int] | None = None) -> Any:
        from headcode.tasks import render

        points = np.concatenate([batch.x[0, :, :-1].numpy(), batch.info["targets"][0].numpy()[:, None]], axis=-1)
        chosen = None if variables is None else (variables[0] - 1, variables[1] - 1)
        terms = batch.info["terms"][0].numpy()
        return render.draw_function(terms, chosen, points=points, t_norm=self.t_norm, title=f"Fuzzy logic · {title}")
