"""Measure: `ops` the attention backends, `train` a training step, `lm` language models, `peers` other libraries.

Example: headcode bench ops --out bench
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headcode.suggest import no_such

KINDS = {
    "ops": (
        "headcode.bench.ops",
        "Ops",
        "Time, ratio and memory of every backend of the op; how cost grows.",
    ),
    "scale": (
        "headcode.bench.scale",
        "Scale",
        "How large a layer's output is at initialisation, and a small GPT's losses.",
    ),
    "widths": ("headcode.bench.widths", "Widths", "The op's cost against torch's softmax, by head width and length."),
    "train": ("headcode.bench.train", "Train", "A training step against plain eager PyTorch, and where its time goes."),
    "lm": ("headcode.bench.lm", "Lm", "Tokens per second of language models against a Hugging Face Llama."),
    "peers": ("headcode.bench.peers", "Peers", "Training steps of ours and of other libraries in one table."),
    "gpu": ("headcode.bench.gpu", "Gpu", "Are the Triton kernels right on this GPU, how fast, how near the roofline."),
    "kernels": ("benchmarks/kernels.py", "Kernels", "Compile the Triton kernels without a GPU: registers, spills."),
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
        raise ValueError(no_such("There is no measurement called", kind, KINDS, "choose one of"))
    module = _load(KINDS[kind][0])
    return parse_with_tyro(getattr(module, KINDS[kind][1]), f"bench {kind}", module.__doc__ or "", list(arguments[1:]))


def _load(name: str) -> Any:
    """A module of the package, or a file of the repository: what only its developers need is not in the wheel."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    root = Path(__file__).parents[2]
    path = root / name
    if not ((root / "pyproject.toml").is_file() and path.is_file()):
        raise ValueError(f"This measurement is {name} in the repository, and not part of an installed headcode.")
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _overview() -> str:
    lines = [f"  {kind:<9}{purpose}" for kind, (_, _, purpose) in KINDS.items()]
    usage = f"usage: headcode bench {{{','.join(KINDS)}}} [options]"
    return "\n".join([usage, "", (__doc__ or "").strip(), "", *lines])
