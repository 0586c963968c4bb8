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
        from headcode.interop.huggingface import load_pretrained

        _quiet_loading()
        self.model, self.tokenizer = load_pretrained(path)
        self.name = "lens/" + (Path(path).name or "model")
        config: Any = self.model.config
        self.num_layers = int(config.num_hidden_layers)
        self._readings: dict[str, Any] = {}
        self._lock = threading.Lock()

    def read(self, text: str) -> Any:
        """`headcode.analysis.lens.Reading` of a sentence."""
        from headcode.analysis.lens import read_model

        with self._lock:
            if text not in self._readings:
                if len(self._readings) >= 16:
                    self._readings.pop(next(iter(self._readings)))
                self._readings[text] = read_model(self.model, text, tokenizer=self.tokenizer, max_tokens=MAX_TOKENS)
            return self._readings[text]


def _quiet_loading() -> None:
    """Progress bars of the loader say nothing here."""
    try:
        from transformers.utils import logging
    except ModuleNotFoundError:
        return  # the loader names the extra
    logging.disable_progress_bar()
    logging.set_verbosity_error()


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
