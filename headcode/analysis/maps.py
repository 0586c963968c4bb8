"""The space of codes as pictures' data: maps in the plane, likeness of rules, and codes along training.

Every result is a file with the arrays and a card that has the seed and all settings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcode.analysis.codes import Keys, capture, codes_of
from headcode.analysis.decode import Decoder, examples, score
from headcode.analysis.files import Arrays, write_arrays
from headcode.analysis.runs import Tell, check_layers, checkpoints_of, open_run, tell_nobody
from headcode.run import RunConfig
from headcode.tasks import Task
from headcode.version import __version__

METHODS = ("tsne", "pca", "umap")


def task_of(codes: Arrays) -> Task:
    """The task that a file of codes was captured on, with its settings."""
    task = RunConfig.from_dict(codes.card["run_config"]).task
    return task.from_dict(codes.card["task_config"])


def make_map(
    codes: Arrays,
    path: str | Path,
    *,
    layer: int,
    query: int | None = None,
    method: str = "tsne",
    size: int = 2000,
    seed: int = 0,
    perplexity: float = 30.0,
) -> Path:
    """A map of one query's codes in one layer: `points` (N, 2) and the labels, with settings in the card.

    `query` is a position, by default the last one captured. Perplexity is t-SNE's; UMAP takes it as its neighbours.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    query = int(np.asarray(codes["queries"])[-1]) if query is None else query
    features = codes_of(codes, layer, query)[:size]
    if len(features) < 5:
        raise ValueError(f"A map needs at least 5 codes, got {len(features)}.")
    if _constant(features):
        raise ValueError(f"The codes of query {query} in layer {layer} are all the same: there is nothing to map.")
    spread = features.std(0)
    standardised = (features - features.mean(0)) / np.where(spread > 0, spread, 1)
    points, settings = _embed(standardised, method, seed, perplexity)
    known = {"correct": np.asarray(codes["correct"]).astype(np.int64), **task_of(codes).map_labels(codes, query)}
    labels = {name: array[:size] for name, array in known.items()}
    card = {
        **codes.card,
        "what": "map",
        "headcode": __version__,
        "method": method,
        "attention": codes.card["method"],
        "layer": layer,
        "query": query,
        "map_seed": seed,
        "map_size": len(features),
        "settings": settings,
    }
    return write_arrays(path, {"points": points.astype(np.float32), **labels}, card)


def _embed(features: np.ndarray, method: str, seed: int, perplexity: float) -> tuple[np.ndarray, dict[str, Any]]:
    if method == "umap":
        try:
            import umap
        except ModuleNotFoundError:
            raise ModuleNotFoundError("UMAP maps need umap-learn: pip install 'headcode[umap]'.") from None
        settings: dict[str, Any] = {"n_neighbors": int(min(perplexity, len(features) - 1)), "random_state": seed}
        return umap.UMAP(**settings).fit_transform(features), {**settings, "umap": umap.__version__}
    try:
        import sklearn
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Maps need scikit-learn: pip install scikit-learn.") from None
    version = {"scikit-learn": sklearn.__version__, "standardised": True}
    if method == "pca":
        reduced = PCA(2, random_state=seed, svd_solver="full").fit(features)
        shares = [float(share) for share in reduced.explained_variance_ratio_]
        return reduced.transform(features), {**version, "explained_variance": shares}
    settings = {"perplexity": float(min(perplexity, (len(features) - 1) / 3)), "init": "pca", "random_state": seed}
    return TSNE(2, **settings).fit_transform(features), {**version, **settings}


def likeness(seen: Arrays, held_out: Arrays, path: str | Path, *, layer: int) -> Path:
    """Cosine similarity of mean codes between rules (or terms): training compositions against held-out ones.

    `cosine` (class, class) compares the means of `seen` (rows) with those of `held_out` (columns); `centred` does so
    after the mean over all seen codes was taken off, which shows what differs between rules. `diagonal_share` in the
    card is how often a held-out mean is most like the seen mean of its own rule, by `centred`.
    """
    task = task_of(seen)
    first, second = examples(task, seen, layer), examples(task, held_out, layer)
    if _constant(first.features):
        raise ValueError(f"The codes in layer {layer} are all the same: there is nothing to compare.")
    rows, columns = _means(first), _means(second)
    centre = np.nanmean(rows, axis=0, keepdims=True)
    occurs = ~np.isnan(columns).any(1) & ~np.isnan(rows).any(1)
    centred = _cosine(rows - centre, columns - centre)
    best = [int(np.nanargmax(centred[:, j])) == j for j in np.flatnonzero(occurs)]
    card = {
        **seen.card,
        "what": "likeness",
        "headcode": __version__,
        "layer": layer,
        "held_out_split": held_out.card["split"],
        "diagonal_share": float(np.mean(best)) if best else None,
        "classes_compared": int(occurs.sum()),
    }
    arrays = {"cosine": _cosine(rows, columns), "centred": centred, "classes": first.classes}
    return write_arrays(path, arrays, card)


def _constant(features: np.ndarray) -> bool:
    """Whether codes differ by rounding alone: in layer 0 a hidden token may know nothing but its place."""
    return not (np.ptp(features, axis=0) > 1e-6 * np.abs(features).max()).any()


def _means(data: Any) -> np.ndarray:
    """(class, channel): the mean code of each class, over instances and then side by side over queries."""
    result = np.full((len(data.classes), data.features[0].size), np.nan)
    for index, wanted in enumerate(data.classes):
        if data.multi:
            chosen = data.labels[:, index]
            if chosen.any():
                result[index] = data.features[chosen].mean(0).ravel()
            continue
        parts = [data.features[data.labels[:, q] == wanted, q] for q in range(data.labels.shape[1])]
        if all(len(part) for part in parts):
            result[index] = np.concatenate([part.mean(0) for part in parts])
    return result


def _cosine(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(columns, axis=1)
    return rows @ columns.T / np.where(norms > 0, norms, 1)


def along_training(
    path: str | Path,
    folder: str | Path,
    *,
    layer: int = -1,
    keys: Keys | None = None,
    inputs: str | None = None,
    split: str = "compositional",
    size: int = 1024,
    checkpoints: Sequence[str] | None = None,
    seed: int = 0,
    progress: Tell = tell_nobody,
) -> dict[str, Any]:
    """Codes at the start and at every checkpoint of a run: decodability and where the mean codes of rules lie.

    `{"card": …, "rows": […]}` with step, macro F1 and accuracy of a decoder fitted at that step, and share solved;
    `training.npz` in `folder` has `means` (step, class, 2), the mean codes in the plane of the last step's two main
    directions, and `steps`.
    """
    if split == "iid":
        raise ValueError("Decoders fitted on 'iid' cannot be tested on it; choose another split.")
    names = checkpoints_of(path) if checkpoints is None else list(checkpoints)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    means, steps = [], []
    card: dict[str, Any] = {}
    classes = np.array([])
    draft = folder / f".training-{seed}.npz"
    try:
        for name in names:
            progress(f"checkpoint {name}", len(rows), len(names))
            run = open_run(path, name, inputs=inputs)
            chosen = check_layers([layer], run.config.model.attention_layers)[0]
            options: dict[str, Any] = {"size": size, "layers": [chosen], "keys": keys}
            fit = examples(run.task, capture(run, "iid", draft, **options), chosen)
            decoder = Decoder(fit, seed)
            means.append(_means(fit))
            test = examples(run.task, capture(run, split, draft, **options), chosen)
            found = score(test, decoder.predict(test), seed=seed)
            rows.append(
                {
                    "step": run.step,
                    "macro_f1": found.macro_f1,
                    "macro_f1_low": found.macro_f1_low,
                    "macro_f1_high": found.macro_f1_high,
                    "accuracy": found.accuracy,
                    "solved": float(test.correct.mean()),
                }
            )
            steps.append(run.step)
            classes = fit.classes
            card = {**run.facts(), "what": "training", "layer": chosen, "split": split, "size": size, "map_seed": seed}
    finally:
        draft.unlink(missing_ok=True)
    last = np.nan_to_num(means[-1])
    centre = last.mean(0)
    plane = np.linalg.svd(last - centre, full_matrices=False)[2][:2].T  # (channel, 2)
    placed = np.stack([(np.nan_to_num(each) - centre) @ plane for each in means])
    write_arrays(
        folder / "training.npz", {"means": placed, "steps": np.array(steps), "classes": classes}, {**card, "rows": rows}
    )
    return {"card": card, "rows": rows}
