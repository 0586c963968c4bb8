"""Which backend serves a call: one visible function, and its reasons."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from headcode.ops import cpu
from headcode.ops.options import Problem
from headcode.ops.registry import VALUE_NETS
from headcode.ops.triton import backend as triton
from headcode.private_api import forward_mode_active, functional_transforms_active, onnx_export_active

logger = logging.getLogger("headcode")

CHUNKED_FROM_ELEMENTS = 2**24
"""`auto` prefers `chunked` to `reference` where the reference's largest intermediate would exceed this many numbers."""


class BackendChoice(NamedTuple):
    """The answer of `explain_backend`."""

    name: str
    reason: str
    rejected: dict[str, str]
    """Every other backend, and why it was not taken."""

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.name}: {self.reason}", *(f"not {name}: {why}" for name, why in self.rejected.items())]
        )


def _serves_all(problem: Problem) -> str | None:
    return None


# name -> the function that says why the backend cannot serve a problem (None: it can), best first.
CANDIDATES: dict[str, Callable[[Problem], str | None]] = {
    "triton": triton.unsupported,
    "cpu": cpu.unsupported,
    "chunked": _serves_all,
    "reference": _serves_all,
}


def choose_backend(problem: Problem, requested: str = "auto") -> BackendChoice:
    """`requested` if it can serve, or an error that says why not; for `auto`, the fastest that can."""
    if not isinstance(requested, str) or requested not in ("auto", *CANDIDATES):
        raise ValueError(f"backend must be one of auto, {', '.join(sorted(CANDIDATES))}, got {requested!r}.")
    rule = missing_rule()
    if rule and requested not in ("auto", "reference"):
        raise ValueError(f"backend {requested!r} has no {rule}; use backend='reference'.")
    if requested == "auto":
        return _choose_automatically(problem, rule)
    if why := CANDIDATES[requested](problem):
        raise ValueError(f"backend {requested!r} cannot serve this call: {why}; use backend='auto'.")
    unchecked = "; by name it is not compared with the reference first" if requested == "triton" else ""
    others = {name: "not asked for" for name in CANDIDATES if name != requested}
    return BackendChoice(requested, f"asked for{unchecked}", others)


def missing_rule() -> str | None:
    """What only the reference has of what is at work here: the other backends would fail, or give zeros in silence."""
    if forward_mode_active():
        return "forward-mode derivative"
    if onnx_export_active():
        return "translation to ONNX"
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        return "trace by torch.jit"  # kernels write to memory, which a trace does not see
    return "rule for the transforms of torch.func" if functional_transforms_active() else None


def _choose_automatically(problem: Problem, rule: str | None) -> BackendChoice:
    if rule:
        rejected = {name: f"it has no {rule}" for name in CANDIDATES if name != "reference"}
        return announce_reference(rule)._replace(rejected=rejected)
    rejected = {}
    for name in ("triton", "cpu"):
        why = CANDIDATES[name](problem) or (triton.avoided(problem) if name == "triton" else None)
        if why is None:
            return _announce(
                _triton_if_right(problem) if name == "triton" else _fastest(name, _reason(problem), rejected)
            )
        rejected[name] = why
    if triton.has_no_kernels(problem.device):
        reason = "the fused kernels are for CPUs and NVIDIA GPUs; this one serves any device with bounded memory"
        return _announce(BackendChoice("chunked", reason, {**rejected, "reference": reason}), logging.WARNING)
    linear = problem.options.value_net == "linear"
    per_pair = problem.heads if linear else max(problem.heads, problem.v_width)
    if VALUE_NETS[problem.options.value_net].middle:
        per_pair = max(per_pair, problem.v_width * (problem.v_width + 1))
    if problem.options.pooling == "max":
        per_pair = max(per_pair, problem.heads * problem.v_width)
    elements = problem.batch * problem.queries * problem.keys * per_pair
    if elements > CHUNKED_FROM_ELEMENTS:
        reason = f"the reference would hold {elements} numbers at once"
        return _announce(BackendChoice("chunked", reason, {**rejected, "reference": reason}))
    small = f"small enough to hold all pairs at once ({elements} numbers)"
    return _announce(BackendChoice("reference", small, {**rejected, "chunked": small}))


def announce_reference(rule: str) -> BackendChoice:
    """That the reference takes over, because it alone has this rule."""
    return _announce(BackendChoice("reference", f"the only one with a {rule}", {}), logging.WARNING)


def _triton_if_right(problem: Problem) -> BackendChoice:
    """The Triton kernels, unless they are known to differ from the reference on this device."""
    from headcode.ops.triton import checked

    # What torch.compile traces must not depend on what happens to be known: the graph finds out when it runs.
    outcome = None if torch.compiler.is_compiling() else checked.outcome_for(problem)
    fused = f"fused kernel for {problem.device}"
    if outcome is None:
        return _fastest("triton", f"{fused}, if it agrees with the reference at its first call here", {})
    if outcome == checked.AGREES:
        return _fastest("triton", f"{fused}; it was compared with the reference here, and agrees", {})
    reason = "it serves in place of the Triton kernels"
    rejected = {"triton": outcome, "cpu": str(CANDIDATES["cpu"](problem)), "reference": "chunked needs less memory"}
    return BackendChoice("chunked", reason, rejected)


def _fastest(name: str, reason: str, rejected: dict[str, str]) -> BackendChoice:
    rest = {other: f"{name} is faster here" for other in CANDIDATES if other != name and other not in rejected}
    return BackendChoice(name, reason, {**rejected, **rest})


def _reason(problem: Problem) -> str:
    if problem.device == "cpu" and cpu.prefers_torch(problem):
        return "it passes this call on to torch's own fused attention, which is faster at this width"
    return f"fused kernel for {problem.device}"


_announced: set[tuple[str, int]] = set()


def _announce(choice: BackendChoice, level: int = logging.INFO) -> BackendChoice:
    """Logged once per backend and process; silent while torch.compile traces, which cannot log."""
    silent = torch.compiler.is_compiling() and not onnx_export_active()
    if not silent and (choice.name, level) not in _announced:
        _announced.add((choice.name, level))
        logger.log(level, "hyper_attention uses the %s backend: %s", choice.name, choice.reason)
    return choice
