"""The thirteen models of Table A1, each with what the paper reports of it: mean and standard error over three seeds.

R² on fuzzy logic (N=32, 70 % held out, 50,000 steps) and accuracy on SRAVEN (×1, 4 layers, 20 million instances), on
held-out compositions, as reported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A row of Table A1."""

    words: str
    """The paper's name of it."""
    fields: Mapping[str, Any]
    """What it changes in a run; nothing if the package has no such model."""
    logic: tuple[float, float]
    sraven: tuple[float, float]

    def reported(self, task: str) -> tuple[float, float]:
        """The paper's mean and standard error on a task."""
        return self.logic if task == "logic" else self.sraven

    def reported_words(self, task: str) -> str:
        """The same, as a table shows it."""
        mean, error = self.reported(task)
        return f"{mean:.3f} (s.e. {error:.3f})"


def _method(name: str, words: str, logic: tuple[float, float], sraven: tuple[float, float]) -> tuple[str, Model]:
    return name, Model(words, {"method": name}, logic, sraven)


TABLE_A1: dict[str, Model] = dict(
    [
        _method("softmax", "softmax attention", (0.6328, 0.0231), (0.5656, 0.0105)),
        _method("linear", "linear attention", (0.5989, 0.0522), (0.5630, 0.0111)),
        _method("hyla", "HYLA", (0.8113, 0.0777), (0.6913, 0.0190)),
        _method("linear_rms", "linear attention + RMSHead", (0.6893, 0.0510), (0.5901, 0.0250)),
        (
            "linear_rms_relu_value",
            Model("linear attention + RMSHead + nonlinear value", {}, (0.5691, 0.0425), (0.5538, 0.0032)),
        ),
        _method("hyla_unnormed", "HYLA - RMSHead", (0.8127, 0.0788), (0.6253, 0.0573)),
        _method("hyla_deep_linear", "HYLA - nonlinearity", (0.8454, 0.0532), (0.5654, 0.0021)),
        _method("hyla_deep_linear_unnormed", "HYLA - nonlinearity - RMSHead", (0.7942, 0.0743), (0.5633, 0.0141)),
        _method("softmax_hyla", "HYLA - RMSHead + softmax", (0.7098, 0.0708), (0.3821, 0.0298)),
        ("hyla_deeper", Model("HYLA + deeper value network", {}, (0.8765, 0.0454), (0.6659, 0.0008))),
        ("softmax_experts", Model("softmax attention + MoE", {}, (0.6383, 0.0607), (0.5768, 0.0131))),
        ("linear_experts", Model("linear attention + MoE", {}, (0.6009, 0.0616), (0.6434, 0.0430))),
        ("hyla_experts", Model("HYLA + MoE", {}, (0.8237, 0.0655), (0.6694, 0.0394))),
    ]
)
"""By the name that each has here."""
