"""All that decides a run's result: a task, a model, an optimiser and a number of steps.

    config = RunConfig(task=task, model=model_for(task, num_layers=4))
    config = override(config, num_points=16, method="softmax")  any field by its own name, wherever it stands

Where and how it runs (folder, device, threads) is not part of it. `headcode.presets` names the paper's runs.
"""

import dataclasses
import typing
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from headcode.config import Config, renamed
from headcode.nn import MODELS, ModelConfig, model_config
from headcode.suggest import no_such
from headcode.tasks import TASKS, Task

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
    """Of AdamW: how much of the mean gradient is kept at each step."""
    beta2: float = 0.999
    """Of AdamW: how much of the mean squared gradient is kept at each step."""
    epsilon: float = 1e-8
    """Of AdamW: added to the root of the mean squared gradient."""
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


@renamed(hint="auxiliary_weight")
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
    """float32 is exact float32 (TF32 off); tf32 allows it in matrix products (GPU); bf16 is autocast,
    which on a CPU needs avx512_bf16."""
    auxiliary_weight: float = 0.0
    """Weight of the task's auxiliary targets in the loss: further heads of the model, which nothing else reads, predict
    what the task knows about the tokens of training instances. 0 is none."""
    balance_weight: float = 0.01
    """Of a model with several experts: weight of a loss that is smallest when all experts are used equally. It is added
    to the gradients alone; the losses of records are the task's."""
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
    """Instances at a time in an evaluation."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 writes only the last one (and the best at an evaluation)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "batch_size", "accumulate", "log_every", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in ("auxiliary_weight", "balance_weight", "eval_every", "eval_size", "checkpoint_every"):
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
        if self.auxiliary_weight and not self.task.auxiliary:
            raise ValueError(
                f"The task {self.task.name} has no auxiliary targets: use auxiliary_weight=0, "
                f"got {self.auxiliary_weight}."
            )
        if self.model.kind != self.task.model_kind:
            raise ValueError(
                f"The task {self.task.name} needs a model of the kind {self.task.model_kind}, got {self.model.kind}: "
                f"make it with model_for(task, …)."
            )
        derived = _derived(self.task, self.auxiliary_weight)
        wrong = [name for name, value in derived.items() if getattr(self.model, name) != value]
        if wrong:
            raise ValueError(
                f"The model does not fit the task: {wrong[0]} must be {derived[wrong[0]]}, "
                f"got {getattr(self.model, wrong[0])}; make it with model_for(task, auxiliary_weight=…, …), "
                f"or change a run with override(config, …)."
            )
        if self.task.causal and not self.model.causal:
            raise ValueError("A language model must not see the tokens that it predicts: causal must be True.")

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return {**values, "task": {"name": self.task.name, **values["task"]}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        given = values.get("task") if isinstance(values, Mapping) else None
        if isinstance(given, Mapping):
            name = given.get("name")
            if not isinstance(name, str) or name not in TASKS:
                raise ValueError(f"RunConfig.task must have a name out of {', '.join(TASKS)}, got {name!r:.100}.")
            task = TASKS[name].from_dict({key: value for key, value in given.items() if key != "name"})
            values = {**values, "task": task}
            if isinstance(model := values.get("model"), Mapping):
                values["model"] = model_config({"kind": task.model_kind, **model})
        return super().from_dict(values)


def _derived(task: Task, auxiliary_weight: float) -> dict[str, Any]:
    """The model's fields that the task and its auxiliary targets decide."""
    return {**task.model_sizes, "auxiliary_dims": task.auxiliary_dims if auxiliary_weight else ()}


def model_for(task: Task, *, auxiliary_weight: float = 0.0, **settings: Any) -> ModelConfig:
    """A ModelConfig with the task's inputs, outputs and length, and heads for its auxiliary targets if they count."""
    if "hint" in settings:
        warnings.warn("hint is called auxiliary_weight now.", DeprecationWarning, stacklevel=2)
        auxiliary_weight = settings.pop("hint")
    return MODELS[task.model_kind].config(**_derived(task, auxiliary_weight), **settings)


def _fitted(config: RunConfig, task: Task, auxiliary_weight: float) -> dict[str, Any]:
    """What another task changes in the run's model. Positions that repeat with the task's period still do so."""
    period = config.model.position_period
    return {
        **_derived(task, auxiliary_weight),
        "position_period": task.period if period is not None and period == config.task.period else period,
    }


SECTIONS = ("task", "model", "optimization")
"""The fields of a RunConfig that are configurations themselves."""
MODEL_DERIVED = ("input_dim", "vocab_size", "output_dim", "max_length", "auxiliary_dims")
"""Fields of every model that follow from the task, beside its `model_sizes`."""


def fields_of(config: RunConfig) -> dict[str, tuple[str | None, str]]:
    """Every field that can be changed, by its flat name: (section or None, field).

    >>> from headcode.presets import preset
    >>> fields_of(preset("logic"))["num_points"], fields_of(preset("logic"))["steps"]
    (('task', 'num_points'), (None, 'steps'))
    """
    flat: dict[str, tuple[str | None, str]] = {
        field.name: (None, field.name) for field in dataclasses.fields(config) if field.name not in SECTIONS
    }
    sizes = (*MODEL_DERIVED, *config.task.model_sizes)
    derived = {"task": ("seed", *config.task.derived_fields), "model": sizes, "optimization": ()}
    for section in SECTIONS:
        for field in dataclasses.fields(getattr(config, section)):
            if field.name not in derived[section]:
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


def known_fields(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes by the names that fields have today, or one sentence about a field that the run does not have."""
    for former in RunConfig.former_names.keys() & changes.keys():
        warnings.warn(f"{former} is called {RunConfig.former_names[former]} now.", DeprecationWarning, stacklevel=3)
    flat = fields_of(config)
    found = RunConfig.with_current_names(changes)
    if unknown := [name for name in found if name not in flat]:
        raise ValueError(no_such(f"A {config.task.name} run has no field", unknown[0], sorted(flat), "it has"))
    return found


def override(config: RunConfig, **changes: Any) -> RunConfig:
    """A copy with fields changed by their flat names; the model's sizes follow the task.

    `seed` is the seed of everything, the task included; `task_seed` sets the task's alone.

    >>> from headcode.presets import preset
    >>> override(preset("logic"), num_points=16).model.max_length
    16
    """
    flat, changes = fields_of(config), known_fields(config, changes)
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
            **_fitted(config, task, by_section[None].get("auxiliary_weight", config.auxiliary_weight))
            | by_section["model"]
        ),
        optimization=config.optimization.replace(**by_section["optimization"]),
        **by_section[None],
    )


def with_task(config: RunConfig, task: Task) -> RunConfig:
    """The same run on another task of its kind; the model's sizes follow."""
    return config.replace(task=task, model=config.model.replace(**_fitted(config, task, config.auxiliary_weight)))
