"""Measure: `ops` times the attention backends, `train` a training step, `lm` language models, `tasks` the puzzles.

Example: headcode bench ops --out bench
"""

import importlib
from collections.abc import Sequence
from typing import Any

KINDS = {
    "ops": (
        "headcode.bench.ops",
        "Ops",
        "Time, ratio and memory of every backend of the op; cost against length.",
    ),
    "train": ("headcode.bench.train", "Train", "A training step against plain eager PyTorch, and where its time goes."),
    "lm": ("headcode.bench.lm", "Lm", "Tokens per second of language models against a Hugging Face Llama."),
    "gpu": ("headcode.bench.gpu", "Gpu", "Are the Triton kernels right on this GPU, how fast, how near the roofline."),
    "kernels": ("headcode.bench.kernels", "Kernels", "Compile the Triton kernels without a GPU: registers, spills."),
    "tasks": ("headcode.bench.tasks", "Tasks", "Speed, ceilings, ambiguity and baselines of the tasks."),
}


def parse(arguments: Sequence[str]) -> Any:
    """The measurement that is asked for; its module is imported only now."""
    from headcode.cli import parse_with_tyro

    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0)
    kind = arguments[0]
    if kind not in KINDS:
        raise ValueError(f"There is nothing called {kind!r} to measure; choose one of: {', '.join(KINDS)}.")
    module = importlib.import_module(KINDS[kind][0])
    return parse_with_tyro(getattr(module, KINDS[kind][1]), f"bench {kind}", module.__doc__ or "", list(arguments[1:]))


def _overview() -> str:
    lines = [f"  {kind:<9}{purpose}" for kind, (_, _, purpose) in KINDS.items()]
    usage = f"usage: headcode bench {{{','.join(KINDS)}}} [options]"
    return "\n".join([usage, "", (__doc__ or "").strip(), "", *lines])
