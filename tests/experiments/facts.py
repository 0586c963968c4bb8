"""What is known of the paper's runs: one row for each figure or table, with the source of its settings.

"Reported" is what public descriptions of the paper say; "sweep", "config" and "callbacks" are `sweeps/*.yaml`,
`configs/*.py` and `callbacks.py` of the authors' repository (smonsays/hypernetwork-attention). `ours` says what no
source tells, and what we have taken in its place.
"""

import dataclasses
from typing import Any

Grid = dict[str | tuple[str, ...], tuple[Any, ...]]

THREE = ("softmax", "linear", "hyla")
EVERY_RUN: Grid = {
    "seed": (0, 1, 2),
    "batch_size": (128,),
    "optimizer": ("adamw",),
    ("beta1", "beta2", "epsilon"): ((0.9, 0.999, 1e-8),),
    ("schedule", "final_rate", "authors_schedule"): (("cosine", 0.1, False),),
    "clip_norm": (None,),
    "attention_dropout": (0.1,),
    ("position", "position_period"): (("relative", None),),
    ("feedforward", "causal", "share_layers", "qk_norm"): (("gelu", False, False, False),),
    "precision": ("float32",),
    "auxiliary_weight": (0.0,),
}
"""configs/*.py; dropout is a default of the authors' attention layers, which no config names."""
LOGIC: Grid = {
    **EVERY_RUN,
    ("num_variables", "num_terms", "novel"): ((4, 2, 0.25),),
    ("dim", "num_layers", "num_heads", "qk_dim", "v_dim"): ((128, 2, 8, 16, 16),),
    ("steps", "warmup_steps"): ((50_000, 100),),
    "eval_size": (16_000,),
}
"""configs/logic.py, logic_4var_2term; Table A3."""
LOGIC_MLP: Grid = {"mlp_dim": (256,)}
LOGIC_SEARCH: Grid = {"learning_rate": (1e-3, 3e-3), "weight_decay": (0.1, 0.03)}
SRAVEN: Grid = {
    **EVERY_RUN,
    ("num_values", "grid", "permute", "aligned", "blank"): ((8, 3, True, 0.0, 0.0),),
    "eval_size": (51_200,),
    "learning_rate": (1e-3, 3e-4),
    "weight_decay": (0.1, 0.3),
}
"""configs/raven.py, raven_3x3_4features; Table A3; the search of sweeps/raven.yaml and raven_ablation.yaml."""
WIDTH = ("dim", "num_heads", "qk_dim", "v_dim", "mlp_dim")
WIDTHS = ((128, 16, 64, 64, 256), (256, 32, 128, 128, 512), (512, 64, 256, 256, 1024))
FOUR_FEATURES: Grid = {"num_features": (4,), "held_out": (0.25,)}
ONE_SIZE: Grid = {WIDTH: WIDTHS[:1], "num_layers": (4,)}
ONE_SIZE_BUT_MLP: Grid = {WIDTH[:-1]: (WIDTHS[0][:-1],), "num_layers": (4,)}
TABLE_A1_LENGTH: Grid = {("steps", "warmup_steps"): ((20_000_000 // 128, 1000),)}
TABLE_A1: Grid = {
    ("method", "num_experts", "experts_per_token", "mlp_dim"): (
        ("softmax", 1, 2, 256),
        ("linear", 1, 2, 256),
        ("linear_rms", 1, 2, 256),
        ("hyla", 1, 2, 256),
        ("hyla_unnormed", 1, 2, 256),
        ("hyla_deep_linear", 1, 2, 256),
        ("hyla_deep_linear_unnormed", 1, 2, 256),
        ("softmax_hyla", 1, 2, 256),
        ("linear_rms_relu_value", 1, 2, 256),
        ("hyla_deeper", 1, 2, 256),
        ("softmax", 8, 2, 128),
        ("linear", 8, 2, 128),
        ("hyla", 8, 2, 128),
    )
}
"""Thirteen models; the number of experts and their width are ours (docs/deviations.md, docs/protocol.md)."""
LIKE_TABLE_A1 = "their length, rates and decays (those of Table A1)"


@dataclasses.dataclass(frozen=True)
class Fact:
    """The grid of one experiment at paper scale."""

    experiment: str
    shows: str
    source: str
    grid: Grid
    """By field, or fields that go together: all values that occur, each crossed with all others."""
    ours: str = ""


FACTS = (
    Fact(
        "logic-generalisation",
        "Fig. 2C",
        "sweep logic",
        {
            **LOGIC,
            **LOGIC_MLP,
            **LOGIC_SEARCH,
            "method": THREE,
            "num_points": (16, 32, 64, 96),
            "held_out": (0.3, 0.5, 0.7),
        },
    ),
    Fact(
        "logic-ablation",
        "Table A1, left",
        "sweep logic_ablation (six models), reported (the others)",
        {**LOGIC, **LOGIC_SEARCH, **TABLE_A1, "num_points": (32,), "held_out": (0.7,)},
        ours="number and width of the experts, and all that the paper does not say of the five models without code",
    ),
    Fact(
        "logic-codes",
        "Figs. 2B, 2D, A2",
        "sweep logic_latent, callbacks",
        {
            **LOGIC,
            **LOGIC_MLP,
            "method": THREE,
            ("num_points", "held_out", "learning_rate", "weight_decay"): ((96, 0.5, 1e-3, 0.1),),
        },
        ours="three seeds in place of one (2024)",
    ),
    Fact(
        "sraven-scaling",
        "Figs. 4, A4",
        "sweep raven",
        {
            **SRAVEN,
            **FOUR_FEATURES,
            "method": THREE,
            WIDTH: WIDTHS,
            "num_layers": (4, 8, 16),
            "steps": (10_000_000 // 128, 20_000_000 // 128, 40_000_000 // 128),
            "warmup_steps": (1000, 3000),
        },
    ),
    Fact(
        "sraven-ablation",
        "Table A1, right",
        "sweep raven_ablation (six models), reported (the others)",
        {**SRAVEN, **FOUR_FEATURES, **ONE_SIZE_BUT_MLP, **TABLE_A1_LENGTH, **TABLE_A1},
        ours="number and width of the experts, and all that the paper does not say of the five models without code",
    ),
    Fact(
        "sraven-codes",
        "Figs. 5A, 5B, 5E, 5F, A6 to A8",
        "reported (depths 4 and 16), sweep raven (all else), callbacks",
        {
            **SRAVEN,
            **FOUR_FEATURES,
            "method": THREE,
            WIDTH: WIDTHS[:1],
            "num_layers": (4, 16),
            "steps": (40_000_000 // 128,),
            "warmup_steps": (1000, 3000),
        },
        ours="which runs of Fig. 4 are read: the longest of width 1",
    ),
    Fact(
        "sraven-heads",
        "Fig. 5C",
        "reported (one head against more)",
        {
            **SRAVEN,
            **FOUR_FEATURES,
            **TABLE_A1_LENGTH,
            "method": THREE,
            "num_heads": (1, 2, 4, 8, 16),
            ("dim", "qk_dim", "v_dim", "mlp_dim", "num_layers"): ((128, 64, 64, 256, 4),),
        },
        ours=f"the numbers of heads; the methods; {LIKE_TABLE_A1}",
    ),
    Fact(
        "sraven-features",
        "Fig. 5D",
        "reported (number of features K)",
        {
            **SRAVEN,
            **ONE_SIZE,
            **TABLE_A1_LENGTH,
            "method": THREE,
            "num_features": (2, 3, 4, 5),
            "held_out": (0.25,),
        },
        ours=f"the values of K; the methods; {LIKE_TABLE_A1}",
    ),
    Fact(
        "sraven-held-out",
        "Fig. A5",
        "reported (shares from 0.1 to 0.9)",
        {
            **SRAVEN,
            **ONE_SIZE,
            **TABLE_A1_LENGTH,
            "method": THREE,
            "num_features": (4,),
            "held_out": (0.1, 0.3, 0.5, 0.7, 0.9),
        },
        ours=f"the shares between 0.1 and 0.9; {LIKE_TABLE_A1}",
    ),
)

REPORTED_A1 = {
    # model: fuzzy logic R² × 100, its standard error, SRAVEN accuracy × 100, its standard error (three seeds).
    "softmax": (63.28, 2.31, 56.56, 1.05),
    "linear": (59.89, 5.22, 56.30, 1.11),
    "hyla": (81.13, 7.77, 69.13, 1.90),
    "linear_rms": (68.93, 5.10, 59.01, 2.50),
    "hyla_unnormed": (81.27, 7.88, 62.53, 5.73),
    "hyla_deep_linear": (84.54, 5.32, 56.54, 0.21),
    "hyla_deep_linear_unnormed": (79.42, 7.43, 56.33, 1.41),
    "softmax_hyla": (70.98, 7.08, 38.21, 2.98),
    "linear_rms_relu_value": (56.91, 4.25, 55.38, 0.32),
    "hyla_deeper": (87.65, 4.54, 66.59, 0.08),
    "softmax_experts": (63.83, 6.07, 57.68, 1.31),
    "linear_experts": (60.09, 6.16, 64.34, 4.3),
    "hyla_experts": (82.37, 6.55, 66.94, 3.94),
}

# Table A3, as reported: by preset, the fields that it tells. Widths are totals over the heads, as in `ModelConfig`.
TABLE_A3: dict[str, dict[str, Any]] = {
    "logic-paper": {
        **{"num_layers": 2, "dim": 128, "qk_dim": 16, "v_dim": 16, "mlp_dim": 256, "num_heads": 8, "batch_size": 128},
        **{"feedforward": "gelu", "position": "relative", "input_dim": 5, "vocab_size": None},
    },
    "sraven-paper": {
        **{"num_layers": 4, "dim": 128, "qk_dim": 64, "v_dim": 64, "mlp_dim": 256, "num_heads": 16, "batch_size": 128},
        **{"feedforward": "gelu", "position": "relative", "input_dim": 8, "vocab_size": None},
    },
    "lm-paper": {
        **{
            "num_layers": 6,
            "dim": 512,
            "qk_dim": 512,
            "v_dim": 512,
            "mlp_dim": 2048,
            "num_heads": 8,
            "batch_size": 256,
        },
        **{"feedforward": "gelu", "position": "rotary", "vocab_size": 32_000, "output_dim": None, "causal": True},
    },
}
OPTIMISER_A3 = {"optimizer": "adamw", "schedule": "cosine", "final_rate": 0.1}
"""Of all of Table A3; the authors' repository adds: no gradient clipping, betas 0.9 and 0.999."""
