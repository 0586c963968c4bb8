"""A sentence under the lens: codes, generated matrices and neighbours in a pretrained transformer."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 48
PIXELS = 96


class Lens:
    """A pretrained model, opened once; sentences are read with it and the last few kept."""

    def __init__(self, path: str | Path) -> None:
        from headcode.analysis.lens import open_model
        from headcode.interop.huggingface import quiet_loading

        quiet_loading()
        self.model = open_model(path)
        if not self.model.has_tokenizer:
            raise ValueError(f"{path} has no tokenizer, and the explorer's lens reads sentences.")
        self.name = "lens/" + (Path(path).name or "model")
        self.num_layers = self.model.num_layers
        self._readings: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, text: str) -> Any:
        """`headcode.analysis.lens.Reading` of a sentence."""
        from headcode.analysis.lens import read_model

        with self._lock:
            if text not in self._readings:
                if len(self._readings) >= 16:
                    self._readings.pop(next(iter(self._readings)))
                self._readings[text] = read_model(self.model, text, max_tokens=MAX_TOKENS)
            return self._readings[text]


def strongest(matrix: np.ndarray, most: int = PIXELS) -> np.ndarray:
    """A large matrix as at most `most` × `most` pixels, each the weight of largest size in its block.

    >>> strongest(np.array([[1.0, -3.0], [2.0, 0.0]]), most=1)
    array([[-3.]])
    """
    block = [-(-size // most) for size in matrix.shape]
    rows, columns = (-(-size // step) for size, step in zip(matrix.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.reshape(rows, block[0], columns, block[1]).swapaxes(1, 2).reshape(rows, columns, -1)
    return np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
