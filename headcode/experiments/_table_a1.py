"""The thirteen models of Table A1, each with what the paper reports of it on held-out compositions.

The numbers are means and standard errors over three seeds, as reported: R² on fuzzy logic (N=32, 70 % held out, 50,000
steps) and accuracy on SRAVEN (×1, 4 layers, 20 million instances).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headcode.experiments.base import Row, Scale
from headcode.nn import ModelConfig
from headcode.run import RunConfig, override


@dataclasses.dataclass(frozen=True)
class Model:
    """A row of Table A1."""

    words: str
    """The paper's name of it."""
    logic: tuple[float, float]
    sraven: tuple[float, float]
    fields: Mapping[str, Any]
    """What it changes in a run, and what tells it from the others."""

    def run(self, base: RunConfig) -> RunConfig:
        """The base's run with this model. Experts are so narrow that a token costs what it costs without them."""
        config = override(base, **self.fields)
        if config.model.num_experts == 1:
            return config
        return override(config, mlp_dim=base.model.mlp_dim // config.model.experts_per_token)

    def reported(self, task: str) -> tuple[float, float]:
        """The paper's mean and standard error on a task."""
        return self.logic if task == "logic" else self.sraven

    def reported_words(self, task: str) -> str:
        """The same, as a table shows it."""
        mean, error = self.reported(task)
        return f"{mean:.3f} (s.e. {error:.3f})"


EXPERTS = {"num_experts": 8}
"""Our choice, as is their width: the paper does not say how many there are. Each token uses two."""
TABLE_A1: dict[str, Model] = {
    "softmax": Model("softmax attention", (0.6328, 0.0231), (0.5656, 0.0105), {"method": "softmax"}),
    "linear": Model("linear attention", (0.5989, 0.0522), (0.5630, 0.0111), {"method": "linear"}),
    "linear_rms": Model("linear attention + RMSHead", (0.6893, 0.0510), (0.5901, 0.0250), {"method": "linear_rms"}),
    "hyla": Model("HYLA", (0.8113, 0.0777), (0.6913, 0.0190), {"method": "hyla"}),
    "hyla_unnormed": Model("HYLA - RMSHead", (0.8127, 0.0788), (0.6253, 0.0573), {"method": "hyla_unnormed"}),
    "hyla_deep_linear": Model(
        "HYLA - nonlinearity", (0.8454, 0.0532), (0.5654, 0.0021), {"method": "hyla_deep_linear"}
    ),
    "hyla_deep_linear_unnormed": Model(
        "HYLA - nonlinearity - RMSHead",
        (0.7942, 0.0743),
        (0.5633, 0.0141),
        {"method": "hyla_deep_linear_unnormed"},
    ),
    "softmax_hyla": Model("HYLA - RMSHead + softmax", (0.7098, 0.0708), (0.3821, 0.0298), {"method": "softmax_hyla"}),
    "linear_rms_relu_value": Model(
        "linear attention + RMSHead + nonlinear value",
        (0.5691, 0.0425),
        (0.5538, 0.0032),
        {"method": "linear_rms_relu_value"},
    ),
    "hyla_deeper": Model("HYLA + deeper value network", (0.8765, 0.0454), (0.6659, 0.0008), {"method": "hyla_deeper"}),
    "softmax_experts": Model(
        "softmax attention + MoE", (0.6383, 0.0607), (0.5768, 0.0131), {"method": "softmax", **EXPERTS}
    ),
    "linear_experts": Model(
        "linear attention + MoE", (0.6009, 0.0616), (0.6434, 0.0430), {"method": "linear", **EXPERTS}
    ),
    "hyla_experts": Model("HYLA + MoE", (0.8237, 0.0655), (0.6694, 0.0394), {"method": "hyla", **EXPERTS}),
}
"""By the name that each has here."""


def is_comparable(task: str, scale: Scale) -> bool:
    """Whether our numbers may stand beside the paper's.

    Fuzzy logic on a laptop is the paper's task and model in fewer steps; SRAVEN on a laptop is another task.
    """
    return task == "logic" or scale == "paper"


# Every field in which these models differ, with its value where a model leaves it alone.
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if any(field.name in model.fields for model in TABLE_A1.values())
}


def with_models(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the name of its model in Table A1 as `model`."""
    names = {_key(model.fields): name for name, model in TABLE_A1.items()}
    return [{**row, "model": names[_key(row)]} for row in rows]


def _key(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(fields.get(name, default) for name, default in _DEFAULTS.items())
