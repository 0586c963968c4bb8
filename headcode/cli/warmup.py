"""Compile the kernels of the presets' models ahead, so that no later command on this machine waits for them.

Example: headcode warmup

Example: headcode warmup --presets sraven --methods hyla
"""

import dataclasses
import subprocess
import time

import torch

from headcode import jit
from headcode.bench.measure import check_words
from headcode.nn import generate, make_model
from headcode.ops import METHODS
from headcode.presets import PRESETS, preset
from headcode.processes import available_cores, safe_python
from headcode.run import RunConfig
from headcode.train.progress import duration

BATCH, TOKENS, VOCABULARY = 2, 2, 64
"""Kernels depend on the heads' widths, norms and value nets, not on how much there is of anything."""


@dataclasses.dataclass(frozen=True)
class Command:
    presets: tuple[str, ...] = tuple(PRESETS)
    """Whose models: names of presets, as headcode train lists them."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Any of the methods."""
    jobs: int | None = None
    """Processes that compile at once; as many as there are cores unless given."""

    def run(self) -> None:
        jit.announce = lambda sentence: None  # that kernels are compiled is what was asked for
        check_words("methods", self.methods)
        if not self.presets or not self.methods:
            raise ValueError("--presets and --methods need one name or more; leave them out for all.")
        configs = [preset(name) for name in self.presets]
        jobs = available_cores() if self.jobs is None else self.jobs
        if jobs < 1:
            raise ValueError(f"--jobs must be 1 or more, got {jobs}.")
        if reason := jit.why_disabled():
            raise ValueError(f"Kernels cannot be compiled: {reason}.")
        start = time.monotonic()
        jobs = min(jobs, len(self.methods))
        if jobs == 1:
            for name, config in zip(self.presets, configs, strict=True):
                for method in self.methods:
                    print(f"{name} {method}", flush=True)
                    use_kernels(config, method)
            return
        words = [*safe_python(), "-m", "headcode", "warmup", "--jobs", "1", "--presets", *self.presets, "--methods"]
        children = [subprocess.Popen([*words, *self.methods[first::jobs]]) for first in range(jobs)]
        if failed := [child.returncode for child in children if child.wait() != 0]:
            raise RuntimeError(f"A process that compiles ended with exit code {failed[0]}.")
        print(f"Done in {duration(time.monotonic() - start)}. The kernels are in {jit.cache_folder()}.")


def use_kernels(config: RunConfig, method: str) -> None:
    """Call everything that is compiled for a run: batches, one step, an evaluation, and decoding if there is any."""
    if not config.task.reads_text:
        config.task.sample("train", 0, BATCH)
    if config.model.kind == "graph_network":  # layers on PyTorch Geometric, of which nothing is compiled ahead
        return
    changes = {"method": method, "num_layers": 1, "cross_layers": 0, "auxiliary_dims": ()}
    if config.model.vocab_size is not None:
        changes["vocab_size"] = VOCABULARY
    model = make_model(config.model.replace(**changes))
    length = config.task.sequence_length
    if model.config.vocab_size is None:
        x = torch.ones(BATCH, length, model.config.input_dim or 1)
    else:
        x = torch.zeros((BATCH, length), dtype=torch.int64)
    model(x, queries=config.task.model_queries, dropout_seed=0).square().mean().backward()
    model.eval()
    with torch.no_grad():
        model(x, queries=config.task.model_queries)
    if model.config.vocab_size and model.config.causal:
        list(generate(model, [0], TOKENS, temperature=0))
