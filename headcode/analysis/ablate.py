"""What the codes' parts are worth: heads and directions taken out, and the number of heads at a fixed width."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.analysis.decode import Examples
from headcode.analysis.runs import OpenRun, Tell, batches, check_layers, check_split, predict, tell_nobody
from headcode.nn import edit_codes
from headcode.run import SECTIONS, RunConfig
from headcode.tasks import Batch
from headcode.tasks.base import add_sums
from headcode.train.evaluate import evaluation_splits
from headcode.train.folder import read_metrics, read_run_config

MODEL_COLUMNS = ("method", "num_heads", "dim", "qk_dim", "v_dim", "num_layers")


def ablate(
    run: OpenRun,
    *,
    split: str = "compositional",
    size: int = 1024,
    layers: Sequence[int] | None = None,
    mode: str = "mean",
    batch_size: int = 256,
    progress: Tell = tell_nobody,
) -> list[dict[str, Any]]:
    """The task's metrics with each head of each layer taken out, one at a time; the first row is the whole model.

    mode: `zero` sets the head's part of every code to 0, `mean` to its mean over the batch, pair by pair.
    """
    if mode not in ("zero", "mean"):
        raise ValueError(f"mode must be zero or mean, got {mode!r}.")
    check_split(run.task, split)
    numbers = check_layers(layers, run.config.model.attention_layers)
    data = list(batches(run.task, split, size, batch_size=batch_size))
    total = 1 + len(numbers) * run.config.model.num_heads
    progress("the whole model", 0, total)
    rows = [{"layer": None, "head": None, "mode": mode, **_metrics(run, data)}]
    for layer in numbers:
        for head in range(run.config.model.num_heads):
            progress(f"layer {layer} without head {head}", len(rows), total)

            def without(number: int, codes: Tensor, head: int = head) -> Tensor:
                codes = codes.clone()
                codes[:, head] = 0 if mode == "zero" else codes[:, head].mean(0)
                return codes

            with edit_codes(run.model, without, layers=layer):
                rows.append({"layer": layer, "head": head, "mode": mode, **_metrics(run, data)})
    return rows


def class_directions(data: Examples, rank: int | None = None) -> np.ndarray:
    """(heads, rank) orthonormal: the directions in which the mean codes of the classes differ, strongest first.

    `data` must be codes of one key per query (keys="self").
    """
    if data.multi:
        means = np.stack([data.features[data.labels[:, c], 0].mean(0) for c in range(data.labels.shape[1])])
    else:
        flat, labels = data.features.reshape(-1, data.features.shape[-1]), data.labels.ravel()
        means = np.stack([flat[labels == c].mean(0) for c in np.unique(labels)])
    directions = np.linalg.svd(means - means.mean(0), full_matrices=False)[2]
    return directions[: rank or min(len(means) - 1, means.shape[1] - 1)].T


def ablate_directions(
    run: OpenRun,
    directions: np.ndarray,
    *,
    layer: int,
    split: str = "compositional",
    size: int = 1024,
    controls: int = 5,
    seed: int = 0,
    batch_size: int = 256,
) -> list[dict[str, Any]]:
    """Metrics with a subspace of the code held at its mean in the codes of the answering tokens to themselves.

    Rows: the whole model, the given directions, and `controls` random subspaces of the same rank.
    """
    layer = check_layers([layer], run.config.model.attention_layers)[0]
    heads = run.config.model.num_heads
    if directions.ndim != 2 or directions.shape[0] != heads:
        raise ValueError(f"directions must be ({heads} heads, rank), got {directions.shape}.")
    data = list(batches(run.task, split, size, batch_size=batch_size))
    places = list(range(run.task.sequence_length))[run.task.queries]
    rng = np.random.default_rng(seed)
    shape = directions.shape
    subspaces = [("none", None), ("classes", directions)]
    subspaces += [("random", np.linalg.qr(rng.normal(size=shape))[0]) for _ in range(controls)]
    rows = []
    for name, basis in subspaces:

        def without(number: int, codes: Tensor, basis: np.ndarray | None = basis) -> Tensor:
            if basis is None:
                return codes
            codes = codes.clone()
            space = torch.as_tensor(basis, dtype=codes.dtype)
            for place in places:
                row = place - (run.task.sequence_length - codes.shape[2])
                own = codes[:, :, row, place]  # (B, H)
                codes[:, :, row, place] = own - (own - own.mean(0)) @ space @ space.T
            return codes

        with edit_codes(run.model, without, layers=layer):
            rows.append({"layer": layer, "directions": name, "rank": shape[1], **_metrics(run, data)})
    return rows


def heads_against_generalisation(runs: Sequence[str | Path]) -> list[dict[str, Any]]:
    """One row per run: heads, widths, method, seed and the last evaluation, for runs that differ in their heads.

    Runs must share all widths and settings and be evaluated at the same step, so that only the number of heads differs.
    """
    rows: list[dict[str, Any]] = []
    settings: list[dict[str, Any]] = []
    for path in runs:
        config = read_run_config(path)
        sizes = {name: getattr(config.model, name) for name in MODEL_COLUMNS}
        row: dict[str, Any] = {"run": Path(path).name, **sizes, "seed": config.seed, "steps": config.steps}
        evaluations = [r for r in read_metrics(path) if r["kind"] == "eval"]
        if not evaluations:
            raise ValueError(f"{path} was never evaluated; give runs with evaluations.")
        last = evaluations[-1]["step"]
        settings.append({**_shared_settings(config), "step of its last evaluation": last})
        metric = "accuracy" if config.task.objective == "classification" else "r2"
        for split in evaluation_splits(config.task):
            found = [r[metric] for r in evaluations if r["step"] == last and r["split"] == split]
            row[split] = found[0] if found else None
        rows.append({**row, "metric": metric})
    if not rows:
        raise ValueError("Give at least one run folder.")
    for other in settings[1:]:
        if differ := [name for name in {**settings[0], **other} if settings[0].get(name) != other.get(name)]:
            raise ValueError(
                f"The runs differ in {differ[0]}; only the number of heads, the method and the seed may differ."
            )
    return sorted(rows, key=lambda row: (row["method"], row["num_heads"], row["seed"]))


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    """Everything that decides a result, by flat names, but for heads, method and seeds."""
    values = config.to_dict()
    sections = {name: values.pop(name) for name in SECTIONS}
    flat = {**sections["task"], **sections["model"], **sections["optimization"], **values}
    free = ("num_heads", "method", "seed", "backend", "log_every", "eval_every", "eval_batch_size", "checkpoint_every")
    return {name: value for name, value in flat.items() if name not in free}


def _metrics(run: OpenRun, data: Sequence[Batch]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for batch in data:
        add_sums(sums, run.task.score(predict(run, batch), batch))
    return run.task.metrics(sums)
