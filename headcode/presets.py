"""The paper's runs, by name: functions that return a RunConfig.

    config = override(preset("logic-paper"), num_points=16, method="softmax")

A task that has none here gets one of its own name, with its `run_settings`.
"""

import functools
from collections.abc import Callable
from typing import Any

from headcode.run import OptimizationConfig, RunConfig, get_field, model_for, override
from headcode.run import fields_of as fields_of
from headcode.run import with_task as with_task
from headcode.suggest import no_such
from headcode.tasks import TASKS, FuzzyLogic, LanguageModelling, Relations, Scan, SRaven, Task

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
    """Fuzzy logic as in the paper: N=32, 70 % held out, 50,000 steps; evaluated on 16,000 sequences."""
    return logic().replace(steps=50_000, eval_every=2500, eval_size=16_000)


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
    """SRAVEN as in the paper: 40 million instances, the longest of its runs; evaluated on 51,200 puzzles."""
    return sraven().replace(steps=40_000_000 // 128, eval_every=5000, eval_size=51_200, checkpoint_every=5000)


def sraven_fast() -> RunConfig:
    """SRAVEN in under an hour on two CPU cores: auxiliary targets, Muon, positions that repeat by row."""
    optimization = {"optimizer": "muon", "learning_rate": 3e-3, "schedule": "stable", "final_rate": 0.0}
    model = {"position": "relative_learned", "position_period": 12, "v_dim": 256, "attention_dropout": 0.0}
    every = {"eval_every": 1000, "checkpoint_every": 1000}
    return override(sraven(), auxiliary_weight=1.0, **optimization, **model, steps=18_000, **every)


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


def _language(vocab_size: int, context: int, model: dict[str, Any], **settings: Any) -> RunConfig:
    """A causal decoder, with SwiGLU feed-forward layers unless the model says otherwise."""
    task = LanguageModelling(vocab_size=vocab_size, context=context)
    return RunConfig(task=task, model=model_for(task, causal=True, **{"feedforward": "swiglu", **model}), **settings)


def lm_small() -> RunConfig:
    """Language modelling in minutes on a CPU: 0.7 M parameters, 2,048 BPE tokens, context 128, 3 M tokens."""
    model = {"num_layers": 3, "qk_dim": 128, "v_dim": 128, "position": "rotary"}
    optimization = OptimizationConfig(learning_rate=3e-3, clip_norm=1.0)
    every = {"eval_every": 250, "eval_size": 256, "eval_batch_size": 16, "checkpoint_every": 250}
    return _language(2048, 128, model, optimization=optimization, steps=1500, batch_size=16, **every)


def lm_paper() -> RunConfig:
    """Table A3 of the paper: 6 layers of width 512, 130 billion tokens of C4. Context, rate and warm-up are ours."""
    sizes = {"dim": 512, "num_layers": 6, "num_heads": 8, "qk_dim": 512, "v_dim": 512, "mlp_dim": 2048}
    optimization = OptimizationConfig(warmup_steps=2000, beta2=0.95, clip_norm=1.0)
    batches = {"steps": 130_000_000_000 // (256 * 1024), "batch_size": 256, "accumulate": 8, "precision": "bf16"}
    every = {"log_every": 100, "eval_every": 5000, "eval_size": 2048, "eval_batch_size": 8}
    model = {**sizes, "position": "rotary", "feedforward": "gelu"}
    return _language(32_000, 1024, model, optimization=optimization, **batches, **every)


def wikitext_authors() -> RunConfig:
    """The authors' WikiText-103 runs: 8 layers of width 128, T5 band, context 256, 6,144 BPE tokens, about 5 epochs."""
    model = {"num_layers": 8, "num_heads": 16, "qk_dim": 128, "v_dim": 128, "attention_dropout": _PAPER_DROPOUT}
    every = {"log_every": 100, "eval_size": 1024, "eval_batch_size": 32}
    return _language(6144, 256, model, optimization=OptimizationConfig(warmup_steps=1000), steps=20_000, **every)


def scan() -> RunConfig:
    """SCAN in minutes on two CPU cores: an encoder-decoder of 0.18 M parameters, on any published split; all ours."""
    task = Scan()
    sizes = {"dim": 64, "num_layers": 2, "decoder_layers": 2, "qk_dim": 64, "v_dim": 64, "mlp_dim": 128}
    return RunConfig(
        task=task,
        model=model_for(task, position="relative_learned", **sizes),
        optimization=OptimizationConfig(optimizer="muon", learning_rate=1e-2, clip_norm=1.0, warmup_steps=200),
        steps=2000,
        batch_size=64,
        eval_every=500,
        eval_size=2048,
        checkpoint_every=500,
    )


def scan_long() -> RunConfig:
    """SCAN for longer and at twice the width: 640,000 commands drawn, where its first paper draws 100,000."""
    sizes = {"dim": 128, "qk_dim": 128, "v_dim": 128, "mlp_dim": 256}
    return override(scan(), **sizes, steps=10_000, eval_size=8192, eval_every=2000, checkpoint_every=2000)


def graph() -> RunConfig:
    """Relations along paths of graphs: one HyperConv block, applied six times, one for each step; not in the paper."""
    task = Relations()
    sizes = {"dim": 64, "num_layers": 6, "num_heads": 8, "qk_dim": 64, "v_dim": 64, "mlp_dim": 128}
    return RunConfig(
        task=task,
        model=model_for(task, share_layers=True, **sizes),
        optimization=OptimizationConfig(learning_rate=3e-3, weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
        steps=4000,
        batch_size=64,
        eval_every=500,
    )


def _plain_run(task: type[Task]) -> RunConfig:
    """The run of a task that has no preset here: what its `run_settings` say."""
    return override(RunConfig(task=task(), model=model_for(task(), causal=task.causal)), **task.run_settings)


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
        scan,
        scan_long,
        graph,
    )
}
DEFAULT_PRESETS = {"logic": "logic", "sraven": "sraven", "lm": "lm-small", "scan": "scan", "graph": "graph"}
"""The preset that a task's name stands for."""
for _name, _task in TASKS.items():
    if _name not in DEFAULT_PRESETS:
        DEFAULT_PRESETS[_name] = _name
        PRESETS.setdefault(_name, functools.partial(_plain_run, _task))


def preset(name: str) -> RunConfig:
    """The configuration of that name.

    >>> preset("logic").task.num_points
    32
    """
    if name not in PRESETS:
        raise ValueError(no_such("There is no preset", name, PRESETS, "the presets are"))
    return PRESETS[name]()


def presets_of(task: str) -> list[str]:
    """The names of a task's presets."""
    return [name for name in PRESETS if preset(name).task.name == task]


def preset_of(task: str, name: str) -> RunConfig:
    """The preset of that name, or one sentence if it is another task's."""
    if name not in PRESETS:
        raise ValueError(no_such("There is no preset", name, presets_of(task), f"the presets of {task} are"))
    config = preset(name)
    if config.task.name != task:
        fitting = ", ".join(presets_of(task))
        raise ValueError(f"The preset {name!r} is for {config.task.name}; those for {task} are: {fitting}.")
    return config
