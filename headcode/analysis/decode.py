"""What can be read from the codes: linear decoders, trained on training compositions and tested on held-out ones.

What is asked the task says (`Task.decodable`): of fuzzy logic which terms are present, from the response token; of
SRAVEN which rule governs each hidden token, with one decoder per token. A number means something only beside its
controls: shuffled labels, codes of the untrained network, the position alone, and the same decoder on the residual
stream.
"""

import csv
import dataclasses
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.analysis.authors import as_authors
from headcode.analysis.codes import Keys, capture, codes_of, default_keys, layers_of
from headcode.analysis.files import Arrays
from headcode.analysis.runs import UNTRAINED, OpenRun, Tell, check_split, open_run, tell_nobody
from headcode.files import is_there, read_json, replace_file, temporary_folder, to_json
from headcode.tasks import Task
from headcode.version import __version__

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
"""Inverse regularisation strengths among which cross-validation chooses."""
FOLDS = 3
CONTROLS = ("shuffled", "untrained", "position", "residual")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Features and labels for decoders; the middle axis is the query tokens, each with its own decoder."""

    features: np.ndarray
    """(instance, query, channel)"""
    labels: np.ndarray
    """(instance, query): a class each; or (instance, class): which classes are present."""
    classes: np.ndarray
    multi: bool
    composition: np.ndarray
    correct: np.ndarray

    def subset(self, rows: np.ndarray) -> "Examples":
        return dataclasses.replace(
            self,
            features=self.features[rows],
            labels=self.labels[rows],
            composition=self.composition[rows],
            correct=self.correct[rows],
        )


@dataclasses.dataclass(frozen=True)
class Score:
    """Macro F1 over the classes that occur, accuracy, and 95 % bootstrap intervals."""

    macro_f1: float
    macro_f1_low: float
    macro_f1_high: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    instances: int


def examples(task: Task, codes: Arrays, layer: int, source: str = "codes") -> Examples:
    """Decoder inputs from a file: `codes`, `residual`, or `position` (a constant: only the token's place is known)."""
    queries = np.asarray(codes["queries"])
    labels, classes, multi = task.decodable(codes)
    if source == "residual":
        features = np.asarray(codes[f"residual_layer_{layer}"])
    elif source == "position":
        features = np.zeros((len(labels), len(queries), 1), np.float32)
    else:
        features = np.stack([codes_of(codes, layer, int(q)) for q in queries], 1)
    if multi:
        features = features.reshape(len(features), 1, -1)
    return Examples(features, labels, classes, multi, np.asarray(codes["composition"]), np.asarray(codes["correct"]))


class Decoder:
    """Standardised logistic regression, its regularisation chosen by cross-validation; one per query or per class.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(0, 3, (200, 1))
    >>> features = np.eye(3)[labels] + 0.1 * rng.normal(size=(200, 1, 3))
    >>> data = Examples(features, labels, np.arange(3), False, labels[:, 0], labels[:, 0] > 0)
    >>> bool((Decoder(data).predict(data) == labels).all())
    True
    """

    def __init__(self, data: Examples, seed: int = 0) -> None:
        self.multi, self.classes, self.seed = data.multi, data.classes, seed
        if data.multi:
            self.models = [self._fit(data.features[:, 0], column) for column in data.labels.T]
        else:
            queries = range(data.labels.shape[1])
            self.models = [self._fit(data.features[:, q], data.labels[:, q]) for q in queries]

    def predict(self, data: Examples) -> np.ndarray:
        """Classes (instance, query); or which classes are present, as many as the true number: (instance, class)."""
        if not self.multi:
            return np.stack([model.predict(data.features[:, q]) for q, model in enumerate(self.models)], 1)
        chances = np.stack([_chance_of_true(model, data.features[:, 0]) for model in self.models], 1)
        ranks = np.argsort(np.argsort(-chances, axis=1, kind="stable"), axis=1)
        return ranks < data.labels.sum(1, keepdims=True)

    def strengths(self) -> list[float]:
        return [model.best_params_["logisticregression__C"] for model in self.models if hasattr(model, "best_params_")]

    def _fit(self, features: np.ndarray, labels: np.ndarray) -> Any:
        linear_model, model_selection, pipeline, preprocessing, dummy = _sklearn()
        classes, counts = np.unique(labels, return_counts=True)
        # A class with fewer examples than folds cannot be validated: it is left out, and the others are still decoded.
        common = np.isin(labels, classes[counts >= FOLDS])
        if len(np.unique(labels[common])) < 2 or not np.ptp(features[common], axis=0).any():
            return dummy.DummyClassifier(strategy="prior").fit(features, labels)
        features, labels = features[common], labels[common]
        steps = pipeline.make_pipeline(
            preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=1000, tol=1e-3)
        )
        folds = model_selection.StratifiedKFold(FOLDS, shuffle=True, random_state=self.seed)
        grid = {"logisticregression__C": list(STRENGTHS)}
        return model_selection.GridSearchCV(steps, grid, scoring="neg_log_loss", cv=folds).fit(features, labels)


def score(data: Examples, predictions: np.ndarray, *, resamples: int = 1000, seed: int = 0) -> Score:
    """Macro F1 and accuracy; the bootstrap resamples whole compositions, since those are what must generalise.

    Accuracy is the share of right classes; with several present, of present classes among as many guesses.
    """
    if data.multi:
        truth, guess = data.labels, predictions
        right, total = (truth & guess).sum(1), truth.sum(1)
    else:
        truth = data.labels[..., None] == data.classes  # (instance, query, class)
        guess = predictions[..., None] == data.classes
        right, total = (data.labels == predictions).sum(1), np.full(len(predictions), predictions.shape[1])
        truth, guess = (
            truth.reshape(len(truth), -1, len(data.classes)),
            guess.reshape(len(guess), -1, len(data.classes)),
        )
    axes = tuple(range(1, truth.ndim - 1))
    hits, guesses, truths = ((a.sum(axes) if axes else a * 1) for a in (truth & guess, guess, truth))
    _, cluster = np.unique(data.composition, return_inverse=True)
    table = np.concatenate([hits, guesses, truths, right[:, None], total[:, None]], 1).astype(float)
    sums = np.zeros((cluster.max() + 1, table.shape[1]))
    np.add.at(sums, cluster, table)
    f1, accuracy = _from_sums(sums.sum(0)[None], len(data.classes))
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=resamples)
    low, high = np.percentile(np.stack(_from_sums(weights @ sums, len(data.classes))), [2.5, 97.5], axis=1)
    return Score(
        macro_f1=float(f1[0]),
        macro_f1_low=float(low[0]),
        macro_f1_high=float(high[0]),
        accuracy=float(accuracy[0]),
        accuracy_low=float(low[1]),
        accuracy_high=float(high[1]),
        instances=len(data.composition),
    )


def _from_sums(sums: np.ndarray, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Macro F1 and accuracy from rows of hits, guesses and truths per class, right and total."""
    hits, guesses, truths = np.split(sums[:, : 3 * num_classes], 3, axis=1)
    occurs = truths > 0
    f1 = np.where(occurs, 2 * hits / np.maximum(guesses + truths, 1), 0)
    return f1.sum(1) / np.maximum(occurs.sum(1), 1), sums[:, -2] / np.maximum(sums[:, -1], 1)


def decode(
    path: str | Path,
    *,
    checkpoint: str = "last",
    fit_split: str = "iid",
    test_splits: Sequence[str] = ("compositional",),
    layers: Sequence[int] | None = None,
    keys: Keys | None = None,
    inputs: str | None = None,
    authors: bool = False,
    fit_size: int = 4096,
    test_size: int = 4096,
    controls: Sequence[str] = CONTROLS,
    seed: int = 0,
    batch_size: int = 256,
    progress: Tell = tell_nobody,
) -> dict[str, Any]:
    """Decoders of a run, layer by layer, with controls: `{"card": …, "rows": […]}`.

    Decoders are fitted on fresh samples (`iid`) of the training compositions. Each row has the layer, `source`
    (codes or a control), `split`, `subset` (all, and for codes solved and failed) and the numbers of `Score`.
    With `authors`, the codes are those that the paper's authors take, whatever `keys` and `inputs` say.
    """
    if unknown := [name for name in controls if name not in CONTROLS]:
        raise ValueError(f"The controls are {', '.join(CONTROLS)}; there is no {unknown[0]!r}.")
    run, pairs = _opened(path, checkpoint, inputs, keys, authors)
    for split in (fit_split, *test_splits):
        check_split(run.task, split)
    if fit_split in test_splits:
        raise ValueError(f"Decoders fitted on {fit_split!r} cannot be tested on it; choose another split.")
    numbers = layers_of(run, layers)
    residual = "residual" in controls
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"layers": numbers, "batch_size": batch_size, **pairs}
    with temporary_folder("decode") as folder:
        sizes = {**dict.fromkeys(test_splits, test_size), fit_split: fit_size}
        total = (len(sizes) + len(numbers)) * (2 if UNTRAINED in controls else 1)
        parts = itertools.count()
        files = {}
        for split, size in sizes.items():
            progress(f"codes of {split}", next(parts), total)
            files[split] = capture(run, split, folder / f"{split}.npz", size=size, residual=residual, **options)
        for layer in numbers:
            progress(f"decoders of layer {layer}", next(parts), total)
            rows += _rows(run.task, files, fit_split, test_splits, layer, controls, seed)
        if UNTRAINED in controls:
            start, _ = _opened(path, UNTRAINED, inputs, keys, authors)
            blank = {}
            for split, size in sizes.items():
                progress(f"codes of {split}, untrained", next(parts), total)
                blank[split] = capture(start, split, folder / f"untrained-{split}.npz", size=size, **options)
            for layer in numbers:
                progress(f"decoders of layer {layer}, untrained", next(parts), total)
                data = examples(run.task, blank[fit_split], layer)
                decoder = Decoder(data, seed)
                for split in test_splits:
                    rows.append(_row(decoder, examples(run.task, blank[split], layer), layer, UNTRAINED, split, seed))
        solved = {split: float(np.mean(files[split]["correct"])) for split in test_splits}
    card = {
        **run.facts(),
        "what": "decoding",
        "headcode": __version__,
        "fit_split": fit_split,
        "fit_size": fit_size,
        "test_size": test_size,
        "keys": pairs["keys"] if isinstance(pairs["keys"], str) else list(pairs["keys"]),
        "authors": authors,
        "inputs": getattr(run.task, "inputs", None),
        "decoder_seed": seed,
        "strengths": list(STRENGTHS),
        "folds": FOLDS,
        "solved": solved,
    }
    rows.sort(key=lambda row: (row["split"], row["layer"], row["subset"] != "all", _order(row["source"])))
    return {"card": card, "rows": rows}


def _opened(
    path: str | Path, checkpoint: str, inputs: str | None, keys: Keys | None, authors: bool
) -> tuple[OpenRun, dict[str, Any]]:
    """The run, and which of its codes count."""
    run = open_run(path, checkpoint, inputs=inputs)
    if authors:
        return as_authors(run)
    return run, {"keys": keys or default_keys(run.task, run.config.model.crossing_layers > 0)}


def write_decoding(result: dict[str, Any], folder: str | Path, name: str = "decode") -> tuple[Path, Path]:
    """`NAME.json` with the card and `NAME.csv` with the rows."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{name}.json", to_json(result))
    table = folder / f"{name}.csv"
    write_csv(result["rows"], table)
    return folder / f"{name}.json", table


def write_csv(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Rows with equal keys as a CSV file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})
    replace_file(path, text.getvalue().encode())
    return path


def read_result(path: str | Path, columns: Mapping[str, Callable[[Any], bool]] | None = None) -> dict[str, Any]:
    """A JSON file with `card` and `rows`, as `write_decoding` and its neighbours write.

    Every row must have these columns, with values that pass their test.
    """
    path = Path(path)
    if not is_there(path):
        raise ValueError(f"{path} does not exist.")
    found = read_json(path)
    rows = found.get("rows") if isinstance(found, dict) and isinstance(found.get("card"), dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} must hold an object with card and rows.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {number} of {path} is not an object.")
        for column, is_valid in (columns or {}).items():
            if column not in row or not is_valid(row[column]):
                raise ValueError(f"Row {number} of {path} has no valid {column}.")
    return found


def _rows(
    task: Task,
    files: dict[str, Arrays],
    fit_split: str,
    test_splits: Sequence[str],
    layer: int,
    controls: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """The rows of one layer that come from the trained model."""
    rows = []
    sources = ["codes", *(name for name in controls if name != UNTRAINED)]
    for source in sources:
        kind = "codes" if source == "shuffled" else source
        data = examples(task, files[fit_split], layer, kind)
        if source == "shuffled":
            order = np.random.default_rng(seed).permutation(len(data.labels))
            data = dataclasses.replace(data, labels=data.labels[order])
        decoder = Decoder(data, seed)
        for split in test_splits:
            test = examples(task, files[split], layer, kind)
            rows.append(_row(decoder, test, layer, source, split, seed))
            if source == "codes":
                for subset, chosen in (("solved", test.correct), ("failed", ~test.correct)):
                    if chosen.any():
                        part = test.subset(np.flatnonzero(chosen))
                        rows.append(_row(decoder, part, layer, source, split, seed, subset))
    return rows


def _row(
    decoder: Decoder, data: Examples, layer: int, source: str, split: str, seed: int, subset: str = "all"
) -> dict[str, Any]:
    numbers = dataclasses.asdict(score(data, decoder.predict(data), seed=seed))
    return {"layer": layer, "source": source, "split": split, "subset": subset, **numbers}


def _order(source: str) -> int:
    return ("codes", "residual", "untrained", "shuffled", "position").index(source)


def _chance_of_true(model: Any, features: np.ndarray) -> np.ndarray:
    chances = model.predict_proba(features)
    column = np.flatnonzero(model.classes_ == 1)
    return chances[:, column[0]] if len(column) else np.zeros(len(features))


def _sklearn() -> tuple[Any, ...]:
    try:
        from sklearn import dummy, linear_model, model_selection, pipeline, preprocessing
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Decoders need scikit-learn: pip install scikit-learn.") from None
    return linear_model, model_selection, pipeline, preprocessing, dummy
