"""The paper's runs as functions that return full configurations, and how single fields of them are changed.

    config = preset("logic-paper")                              a RunConfig
    config = override(config, num_points=16, method="softmax")  any field by its own name, wherever it stands

A run's result is a function of its RunConfig; where and how it runs (folder, device, threads) is not part of it.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from headcode.config import Config
from headcode.nn import ModelConfig
from headcode.tasks import TASKS, FuzzyLogic, LanguageModelling, SRaven, Task

MOST_TOKENS = 2**28
"""Tokens of one forward pass, on all processes together: far beyond what any machine computes at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizationConfig(Config):
    """The optimiser and its learning rate: linear warm-up from 0, then down to a share of the peak."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside the blocks (and AdamW for all else)."""
    learning_rate: float = 1e-3
    """The peak, reached at the end of the warm-up."""
    schedule: Literal["cosine", "stable"] = "cosine"
    """After the warm-up: cosine falls all the way; stable holds the peak, then falls in a line over `decay_share`."""
    decay_share: float = 0.25
    """Of the schedule `stable`: the last share of the run's steps, over which the rate falls."""
    final_rate: float = 0.1
    """Where the rate ends, as a share of the peak."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0; at most a tenth of the run's steps are taken."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; not on 1-D parameters (query, key and value biases count as 2-D)."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float | None = None
    """Scale gradients down to this norm when they are longer; None leaves them alone."""
    authors_schedule: bool = False
    """End the cosine `warmup_steps` before the last step, as the authors' code does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")
        for name in ("final_rate", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}.")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share must lie in 0..1, got {self.decay_share}.")
        if self.authors_schedule and self.schedule != "cosine":
            raise ValueError(f"authors_schedule is a cosine, and schedule is {self.schedule!r}: use one of the two.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be above 0, or None for no clipping, got {self.clip_norm}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Everything that decides the result of a training run."""

    task: Task
    model: ModelConfig
    optimization: OptimizationConfig = dataclasses.field(default_factory=OptimizationConfig)
    steps: int = 8000
    """Optimiser steps."""
    batch_size: int = 128
    """Sequences per step, over all processes and accumulated parts together."""
    accumulate: int = 1
    """Parts into which a batch is divided, one after the other, to save memory."""
    precision: Literal["float32", "tf32", "bf16", "float64"] = "float32"
    """float32 is exact float32 (TF32 off); tf32 allows it in matrix products (GPU); bf16 is autocast (made for GPU)."""
    hint: float = 0.0
    """Weight of the task's hints in the loss: further heads of the model, which nothing else reads, answer the task's
    `questions` about the tokens of training instances. 0 is none."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, and evaluate that."""
    seed: int = 0
    """Decides initial weights and dropout. As a flag it sets the task's seed as well, unless task_seed is given."""
    log_every: int = 50
    """Steps between lines of training loss in metrics.jsonl."""
    eval_every: int = 1000
    """Steps between evaluations; 0 evaluates only after the last step."""
    eval_size: int = 4096
    """Instances of each evaluation stream; 0 means no evaluation."""
    eval_batch_size: int = 256
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 writes only the last one (and the best at an evaluation)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch_size", "accumulate", "log_every", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("hint", "eval_every", "eval_size", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in 0..2**63-1, got {self.seed}.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size must be divisible by accumulate, got {self.batch_size} and {self.accumulate}."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie between 0 and 1, or be None for no average, got {self.ema_decay}.")
        at_once = max(self.batch_size // self.accumulate, self.eval_batch_size) * self.task.sequence_length
        if at_once > MOST_TOKENS:
            raise ValueError(
                f"At most {MOST_TOKENS:,} tokens are computed at once, and this run has {at_once:,} (batch_size, "
                f"divided by accumulate, or eval_batch_size, times the sequence length): use smaller ones."
            )
        if self.hint and not self.task.questions:
            raise ValueError(f"The task {self.task.name} has no hints to give: use hint=0, got {self.hint}.")
        derived = _derived(self.task, self.hint)
        wrong = [name for name, value in derived.items() if getattr(self.model, name) != value]
        if wrong:
            raise ValueError(
                f"The model does not fit the task: {wrong[0]} must be {derived[wrong[0]]}, "
                f"got {getattr(self.model, wrong[0])}; make it with model_for(task, hint=…, …), "
                f"or change a run with override(config, …)."
            )
        if isinstance(self.task, LanguageModelling) and not self.model.causal:
            raise ValueError("A language model must not see the tokens that it predicts: causal must be True.")

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return {**values, "task": {"name": self.task.name, **values["task"]}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        task = values.get("task") if isinstance(values, Mapping) else None
        if isinstance(task, Mapping):
            name = task.get("name")
            if not isinstance(name, str) or name not in TASKS:
                raise ValueError(f"RunConfig.task must have a name out of {', '.join(TASKS)}, got {name!r:.100}.")
            settings = {key: value for key, value in task.items() if key != "name"}
            values = {**values, "task": TASKS[name].from_dict(settings)}
        return super().from_dict(values)


def _derived(task: Task, hint: float) -> dict[str, Any]:
    """The model's fields that the task and its hints decide."""
    return {**task.model_sizes, "hint_dims": task.hint_dims if hint else ()}


def model_for(task: Task, *, hint: float = 0.0, **settings: Any) -> ModelConfig:
    """A ModelConfig whose inputs, outputs and length are the task's, with heads for its hints if they have a weight."""
    return ModelConfig(**_derived(task, hint), **settings)


def _fitted(config: RunConfig, task: Task, hint: float) -> dict[str, Any]:
    """What another task changes in the run's model. Positions that repeat with the task's period still do so."""
    period = config.model.position_period
    return {
        **_derived(task, hint),
        "position_period": task.period if period is not None and period == config.task.period else period,
    }


# The sections of a RunConfig that are themselves configurations, and the fields of them that cannot be set by hand.
SECTIONS = ("task", "model", "optimization")
_NOT_BY_HAND = {
    "task": ("seed", "shards", "tokenizer_hash"),
    "model": ("input_dim", "vocab_size", "output_dim", "max_length", "hint_dims"),
}


def fields_of(config: RunConfig) -> dict[str, tuple[str | None, str]]:
    """Every field that can be changed, by its flat name: (section or None, field).

    >>> fields_of(preset("logic"))["num_points"], fields_of(preset("logic"))["steps"]
    (('task', 'num_points'), (None, 'steps'))
    """
    flat: dict[str, tuple[str | None, str]] = {
        field.name: (None, field.name) for field in dataclasses.fields(config) if field.name not in SECTIONS
    }
    for section in SECTIONS:
        for field in dataclasses.fields(getattr(config, section)):
            if field.name not in _NOT_BY_HAND.get(section, ()):
                if field.name in flat:
                    raise ValueError(f"Two fields of this run are called {field.name!r}: rename the task's.")
                flat[field.name] = (section, field.name)
    return {**flat, "task_seed": ("task", "seed")}


def owner_of(config: RunConfig, name: str) -> tuple[Config, str]:
    """The configuration that a field stands in, and its name there."""
    section, field = fields_of(config)[name]
    return (config if section is None else getattr(config, section)), field


def get_field(config: RunConfig, name: str) -> Any:
    owner, field = owner_of(config, name)
    return getattr(owner, field)


def field_type(config: RunConfig, name: str) -> Any:
    owner, field = owner_of(config, name)
    return typing.get_type_hints(type(owner))[field]


def override(config: RunConfig, **changes: Any) -> RunConfig:
    """A copy with fields changed by their flat names; the model's sizes follow the task.

    `seed` is the seed of everything, the task included; `task_seed` sets the task's alone.

    >>> override(preset("logic"), num_points=16).model.max_length
    16
    """
    flat = fields_of(config)
    if unknown := [name for name in changes if name not in flat]:
        raise ValueError(
            f"A {config.task.name} run has no field {', '.join(map(repr, unknown))}; it has: {', '.join(sorted(flat))}."
        )
    if "seed" in changes:
        changes.setdefault("task_seed", changes["seed"])
    by_section: dict[str | None, dict[str, Any]] = {None: {}, **{section: {} for section in SECTIONS}}
    for name, value in changes.items():
        section, field = flat[name]
        by_section[section][field] = value
    task = config.task.replace(**by_section["task"])
    return config.replace(
        task=task,
        model=config.model.replace(
            **_fitted(config, task, by_section[None].get("hint", config.hint)) | by_section["model"]
        ),
        optimization=config.optimization.replace(**by_section["optimization"]),
        **by_section[None],
    )


# The authors' runs all have attention dropout 0.1, from a default that their configs never mention.
_PAPER_DROPOUT = 0.1


def logic() -> RunConfig:
    """Fuzzy logic: the paper's model, N=32, 70 % held out, in 8,000 steps."""
    task = FuzzyLogic(num_points=32, held_out=0.7)
    return RunConfig(
        task=task,
        model=model_for(task, attention_dropout=_PAPER_DROPOUT),
        optimization=OptimizationConfig(learning_rate=1e-3, weight_decay=0.1, warmup_steps=100),
        steps=8000,
        eval_every=500,
    )


def logic_paper() -> RunConfig:
    """Fuzzy logic as in the paper: N=32, 70 % held out, 50,000 steps."""
    return logic().replace(steps=50_000, eval_every=1000)


def logic_small() -> RunConfig:
    """Fuzzy logic for a first look: N=16, 50 % held out, 2,000 small batches of Muon at a high rate; about a minute."""
    quick = override(logic(), optimizer="muon", learning_rate=1e-2, batch_size=64)
    return override(quick, num_points=16, held_out=0.5, steps=2000, eval_every=400, eval_size=2048)


def sraven() -> RunConfig:
    """SRAVEN: the paper's ×1 model (4 layers, 16 heads) on 10 million instances."""
    task = SRaven()
    return RunConfig(
        task=task,
        model=model_for(task, num_layers=4, num_heads=16, qk_dim=64, v_dim=64, attention_dropout=_PAPER_DROPOUT),
        optimization=OptimizationConfig(learning_rate=1e-3, weight_decay=0.1, warmup_steps=1000),
        steps=10_000_000 // 128,
        log_every=100,
        eval_every=2500,
        checkpoint_every=2500,
    )


def sraven_paper() -> RunConfig:
    """SRAVEN as in the paper: 40 million instances, the longest of its runs."""
    return sraven().replace(steps=40_000_000 // 128, eval_every=5000, checkpoint_every=5000)


def sraven_fast() -> RunConfig:
    """SRAVEN in under an hour on two CPU cores: hints, Muon at a high rate, positions that repeat row by row."""
    return override(
        sraven(),
        hint=1.0,
        learning_rate=3e-3,
        optimizer="muon",
        schedule="stable",
        final_rate=0.0,
        attention_dropout=0.0,
        position="relative_learned",
        position_period=12,
        v_dim=256,
        steps=18_000,
        eval_every=1000,
        checkpoint_every=1000,
    )


def sraven_small() -> RunConfig:
    """SRAVEN for a first look: 2 layers, puzzles of 2 features, no permutations, 2,000 steps."""
    return override(
        sraven(), num_features=2, permute=False, num_layers=2, steps=2000, log_every=50, eval_every=500, eval_size=2048
    )


def sraven_width_2() -> RunConfig:
    """SRAVEN, every width and the heads ×2."""
    return _widened(2)


def sraven_width_4() -> RunConfig:
    """SRAVEN, every width and the heads ×4."""
    return _widened(4)


def sraven_depth_8() -> RunConfig:
    """SRAVEN with 8 layers."""
    return override(sraven(), num_layers=8)


def sraven_depth_16() -> RunConfig:
    """SRAVEN with 16 layers."""
    return override(sraven(), num_layers=16)


def _widened(factor: int) -> RunConfig:
    names = ("dim", "num_heads", "qk_dim", "v_dim", "mlp_dim")
    return override(sraven(), **{name: factor * get_field(sraven(), name) for name in names})


def with_task(config: RunConfig, task: Task) -> RunConfig:
    """The same run on another task of its kind; the model's sizes follow."""
    return config.replace(task=task, model=config.model.replace(**_fitted(config, task, config.hint)))


def lm_small() -> RunConfig:
    """Language modelling in minutes on a CPU: 0.7 M parameters, 2,048 BPE tokens, context 128, 3 M tokens."""
    task = LanguageModelling(vocab_size=2048, context=128)
    return RunConfig(
        task=task,
        model=model_for(
            task,
            num_layers=3,
            num_heads=8,
            qk_dim=128,
            v_dim=128,
            mlp_dim=256,
            feedforward="swiglu",
            position="rotary",
            causal=True,
        ),
        optimization=OptimizationConfig(learning_rate=3e-3, weight_decay=0.1, warmup_steps=100, clip_norm=1.0),
        steps=1500,
        batch_size=16,
        eval_every=250,
        eval_size=256,
        eval_batch_size=16,
        checkpoint_every=250,
    )


def lm_paper() -> RunConfig:
    """The paper's size: 50 M parameters, 130 billion tokens of C4. All else the paper leaves open and is our choice."""
    task = LanguageModelling(vocab_size=32_000, context=1024)
    return RunConfig(
        task=task,
        model=model_for(
            task,
            dim=512,
            num_layers=8,
            num_heads=16,
            qk_dim=512,
            v_dim=512,
            mlp_dim=2048,
            feedforward="swiglu",
            position="rotary",
            causal=True,
        ),
        optimization=OptimizationConfig(
            learning_rate=1e-3, weight_decay=0.1, warmup_steps=2000, beta2=0.95, clip_norm=1.0
        ),
        steps=130_000_000_000 // (512 * 1024),
        batch_size=512,
        accumulate=16,
        precision="bf16",
        log_every=100,
        eval_every=5000,
        eval_size=2048,
        eval_batch_size=8,
        checkpoint_every=1000,
    )


def wikitext_authors() -> RunConfig:
    """The authors' WikiText-103 runs: 8 layers of width 128, T5 band, context 256, 6,144 BPE tokens, about 5 epochs."""
    task = LanguageModelling(vocab_size=6144, context=256)
    return RunConfig(
        task=task,
        model=model_for(
            task,
            num_layers=8,
            num_heads=16,
            qk_dim=128,
            v_dim=128,
            mlp_dim=256,
            feedforward="swiglu",
            position="relative",
            causal=True,
            attention_dropout=_PAPER_DROPOUT,
        ),
        optimization=OptimizationConfig(learning_rate=1e-3, weight_decay=0.1, warmup_steps=1000),
        steps=20_000,
        batch_size=128,
        log_every=100,
        eval_every=1000,
        eval_size=1024,
        eval_batch_size=32,
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        logic,
        logic_paper,
        logic_small,
        sraven,
        sraven_paper,
        sraven_fast,
        sraven_small,
        sraven_width_2,
        sraven_width_4,
        sraven_depth_8,
        sraven_depth_16,
        lm_small,
        lm_paper,
        wikitext_authors,
    )
}
DEFAULT_PRESETS = {"logic": "logic", "sraven": "sraven", "lm": "lm-small"}
"""The preset that a task's name stands for."""


def preset(name: str) -> RunConfig:
    """The configuration of that name.

    >>> preset("logic").task.num_points
    32
    """
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; the presets are: {', '.join(PRESETS)}.")
    return PRESETS[name]()
