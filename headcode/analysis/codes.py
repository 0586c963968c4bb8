"""Codes of a whole split, streamed to a file with everything that is known about each instance.

    capture(open_run("runs/first"), "compositional", "codes.npz", size=50_000)
    codes = open_arrays("codes.npz")
    codes["codes_layer_0"]       (instance, pair, head) float32: a code is a row
    codes["pairs"]               (pair, 2): query and key position
    codes["token_rules"], …      the task's labels, predictions, targets, correct

Memory holds one batch, and of it only the codes of the chosen pairs: never T×T of a split.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcode.analysis.files import Arrays, open_arrays, stream_to
from headcode.analysis.runs import OpenRun, batches, check_layers, check_split, predict
from headcode.nn import Transformer, capture_codes
from headcode.tasks import Batch, Task
from headcode.version import __version__

Keys = str | Sequence[int]


def default_keys(task: Task, crossing: bool) -> Keys:
    """Those that the task names (`Task.code_keys`); all, if its answers attend to the tokens before them alone."""
    return "all" if crossing else task.code_keys


def choose_pairs(task: Task, queries: Sequence[int] | None, keys: Keys | None, *, crossing: bool = False) -> np.ndarray:
    """(pair, 2) query and key positions, query by query.

    Args:
        queries: positions, negative ones from the end; None means those that the task names (`Task.code_queries`).
        keys: `self` (each query's code to itself), `all`, or positions; None means `default_keys`.
        crossing: the queries attend to the tokens before the answers alone (a model with `crossing_layers`).
    """
    length = task.sequence_length
    if keys is None:
        keys = default_keys(task, crossing)
    num_keys = range(length)[task.queries].start if crossing and task.queries is not None else length
    rows = (
        list(range(length))[task.code_queries] if queries is None else [_position("query", q, length) for q in queries]
    )
    if isinstance(keys, str):
        if keys not in ("self", "all"):
            raise ValueError(f"keys must be self, all or positions, got {keys!r}.")
        if keys == "self" and crossing:
            raise ValueError("The answers of a model with cross-attention do not see themselves; use keys='all'.")
        columns = [[q] if keys == "self" else list(range(num_keys)) for q in rows]
    else:
        columns = [[_position("key", k, num_keys) for k in keys]] * len(rows)
    pairs = [(q, k) for q, row in zip(rows, columns, strict=True) for k in row]
    if not pairs:
        raise ValueError("At least one query and one key are needed.")
    return np.array(pairs)


def capture(
    run: OpenRun,
    split: str,
    path: str | Path,
    *,
    size: int = 4096,
    start: int = 0,
    layers: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
    keys: Keys | None = "self",
    residual: bool = False,
    batch_size: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Arrays:
    """Write the codes of instances start … start+size-1 of a split to `path` (.npz or .parquet), and open it.

    `residual` adds `residual_layer_i` (instance, query, dim): the residual stream after layer i at each query, for
    comparison. Everything is exact on every method and backend (`capture_codes`).
    """
    check_split(run.task, split)
    numbers = layers_of(run, layers)
    pairs = choose_pairs(run.task, queries, keys, crossing=run.config.model.crossing_layers > 0)
    card = {
        **run.facts(),
        "what": "codes",
        "headcode": __version__,
        "split": split,
        "start": start,
        "size": size,
        "layers": numbers,
        "task_config": run.task.to_dict(),
    }
    with stream_to(path) as stream:
        for batch in batches(run.task, split, size, start, batch_size):
            stream.append(read_batch(run, batch, numbers, pairs, residual))
            if progress is not None:
                progress(len(batch.x))
        stream.close(card, {"pairs": pairs, "queries": _distinct(pairs[:, 0])})
    return open_arrays(path)


def layers_of(run: OpenRun, layers: Sequence[int] | None) -> list[int]:
    """The layers asked for, counted from 0; None means all that the answers pass through."""
    model = run.config.model
    numbers = check_layers(layers, model.attention_layers)
    first = model.attention_layers - model.crossing_layers if model.crossing_layers else 0
    if layers is None:
        return numbers[first:]
    if numbers[0] < first:
        raise ValueError(
            f"The answers of this model with cross-attention are in layers {first} and later, not {layers}."
        )
    return numbers


def read_batch(
    run: OpenRun, batch: Batch, layers: Sequence[int], pairs: np.ndarray, residual: bool
) -> dict[str, np.ndarray]:
    """Codes, labels and predictions of one batch, by the names that they have in a file."""
    queries, keys = _distinct(pairs[:, 0]), _distinct(pairs[:, 1])
    last = run.config.model.attention_layers - 1
    # The last layer computes only the tokens that are read: for other queries the whole sequence is needed.
    read = range(run.task.sequence_length)[run.task.queries]
    outside = last in layers and not set(queries.tolist()) <= set(read)
    chosen: dict[str, Any] = {"layers": list(layers), "queries": queries.tolist(), "keys": keys.tolist()}
    with _residual_stream(run.model, layers if residual else []) as hidden, capture_codes(run.model, **chosen) as codes:
        prediction = predict(run, batch, everywhere=outside)
    rows, columns = np.searchsorted(queries, pairs[:, 0]), np.searchsorted(keys, pairs[:, 1])
    found: dict[str, np.ndarray] = {
        f"codes_layer_{layer}": codes[layer][:, :, rows, columns].transpose(1, 2).float().numpy() for layer in layers
    }
    for layer, stream in hidden.items():
        # A stream shorter than the sequence holds its last tokens.
        places = queries - (run.task.sequence_length - stream.shape[1])
        found[f"residual_layer_{layer}"] = stream[:, places].float().numpy()
    labels = {name: batch.info[name].numpy() for name in ("instance", *run.task.labels)}
    return {**labels, **run.task.judge(prediction, batch), **found}


def codes_of(codes: Arrays, layer: int, query: int) -> np.ndarray:
    """(instance, keys · heads): the codes of one query in one layer, its keys side by side."""
    name = f"codes_layer_{layer}"
    if name not in codes:
        known = [int(n.removeprefix("codes_layer_")) for n in codes if n.startswith("codes_layer_")]
        raise ValueError(f"The file has codes of layers {', '.join(map(str, known))}; there is no layer {layer}.")
    places = np.flatnonzero(np.asarray(codes["pairs"])[:, 0] == query)
    if not len(places):
        raise ValueError(f"The file has queries {np.asarray(codes['queries']).tolist()}; there is no query {query}.")
    return np.asarray(codes[name][:, places]).reshape(len(codes[name]), -1)


def _distinct(values: np.ndarray) -> np.ndarray:
    return np.unique(values)


def _position(name: str, position: int, length: int) -> int:
    if not -length <= position < length:
        raise ValueError(f"This task has {length} tokens, 0 to {length - 1}; there is no {name} {position}.")
    return position % length


@contextmanager
def _residual_stream(model: Transformer, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """The outputs of the blocks of layers, by layer, of the last forward pass."""
    hidden: dict[int, Tensor] = {}
    blocks = model.layer_blocks()
    calls = dict.fromkeys(blocks, 0)
    handles = []

    def note(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
        numbers = [number for number, block in enumerate(blocks) if block is module]
        if model.config.share_layers:  # a block of several layers, one call after the other
            numbers = [numbers[calls[module] % len(numbers)]]
            calls[module] += 1
        hidden.update({number: output.detach() for number in numbers if number in layers})

    for block in calls:
        handles.append(block.register_forward_hook(note))
    try:
        yield hidden
    finally:
        for handle in handles:
            handle.remove()
