"""`auto`'s way to the Triton backend: compared with the reference before it is relied on; `chunked` where it differs.

The kernels were written without a GPU. So, at the first call of each kind on a device, a small problem of that kind is
computed by them and by the float64 reference on the CPU: output and gradients, within BOUNDS. The outcome is remembered
for this device, driver and these versions, in memory and in the user's cache folder.

To the registered op this module is a backend of its own, `checked`: a compiled graph holds it as such, and the
comparison comes when the graph runs, never while it is traced.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.files import read_object, replace_file, to_json
from headcode.jit import private_folder, sources
from headcode.ops import chunked, reference
from headcode.ops.options import AttentionGradients, AttentionInputs, AttentionOptions, Problem
from headcode.ops.triton import backend, plan, tuning
from headcode.private_api import driver_version

logger = logging.getLogger("headcode")

BOUNDS = {"float32": (1e-4, 1e-3), "tf32": (5e-3, 2e-2), "bfloat16": (2e-2, 5e-2), "float16": (3e-3, 1e-2)}
"""Relative RMS error of the output and of the gradients, at most."""
BATCH, QUERIES, KEYS = 2, 37, 67
"""Ragged, and several tiles of keys."""
AGREES = ""


class Kind(NamedTuple):
    """What the kernels are compiled for; batch and lengths are given to them at each launch."""

    arithmetic: str
    """One of BOUNDS."""
    heads: int
    qk_width: int
    v_width: int
    norm: str
    value_net: str
    pooling: str
    masked: bool
    band: bool
    causal: bool
    dropout: bool


saved_shape = backend.saved_shape


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out: Tensor, saved: Tensor) -> None:
    """Fill `out` (B, H, Tq, Dv) and `saved`."""
    chosen = _backend(inputs, options)
    if chosen is chunked:
        saved.fill_(float("nan"))
    chosen.forward(inputs, options, out=out, saved=saved)


def backward(grad: Tensor, inputs: AttentionInputs, options: AttentionOptions, **buffers: Any) -> None:
    """Fill the gradients."""
    _backend(inputs, options).backward(grad, inputs, options, **buffers)


def _backend(inputs: AttentionInputs, options: AttentionOptions) -> ModuleType:
    return backend if agrees(kind_of(Problem.of(inputs, options)), inputs.q.device) else chunked


def kind_of(problem: Problem) -> Kind:
    options = problem.options
    return Kind(
        _arithmetic(problem),
        problem.heads,
        problem.qk_width,
        problem.v_width,
        options.norm,
        options.value_net,
        options.pooling,
        masked=problem.mask != "none",
        band=problem.relative_bias,
        causal=options.causal,
        dropout=options.dropout > 0,
    )


def outcome_for(problem: Problem) -> str | None:
    """What is known of a problem's kind on the current device: AGREES, why not, or None before the comparison."""
    on_gpu = problem.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(problem.device)
    outcome = _remembered(kind_of(problem), device)
    if outcome:
        _warn(outcome, device)
    return outcome


_lock = threading.Lock()
_outcomes: dict[tuple[Kind, torch.device], str] = {}
_warned = False


def agrees(kind: Kind, device: torch.device) -> bool:
    """Whether the kernels agree with the reference on this kind of problem; compares them if that is not known."""
    outcome = _outcomes.get((kind, device))
    if outcome is None:
        with _lock:
            outcome = _remembered(kind, device)
            if outcome is None:
                outcome = _outcomes[kind, device] = _find_out(kind, device)
    if outcome:
        _warn(outcome, device)
    return outcome == AGREES


def _find_out(kind: Kind, device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Final for this process: what runs forward must also run backward.
        return "its first call came while a CUDA graph was captured, when nothing can be compared; run one step before"
    try:
        # In a thread of its own nothing of the caller's is at work: autocast, inference mode, dispatch modes, …
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(compare, kind, device).result()
    except Exception as error:  # whatever a compiler or a driver may raise; another process may have more luck
        return f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    _write(_identity(kind, device), outcome)
    return outcome


def _warn(outcome: str, device: torch.device) -> None:
    """Once per process; `explain_backend` tells the rest."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "hyper_attention uses the chunked backend in place of the Triton kernels on %s: %s. To report a difference "
            "or failure, give the output of `headcode info` and of `headcode bench gpu`.",
            environment(device)["device"],
            outcome,
        )


def compare(kind: Kind, device: torch.device) -> str:
    """The first result of the kernels that is further from the reference's than its bound, in words; or AGREES."""
    grad, inputs, options = _small_problem(kind)
    wanted = _by_reference(grad, inputs, options)
    found = _by_kernels(grad, inputs, options, kind, device)
    smallest = max(0.1, 0.02 * max(map(_size, wanted)))  # where terms cancel, what is left is rounding
    forward_bound, gradient_bound = BOUNDS[kind.arithmetic]
    names = ("the output", *(f"the gradient of {name}" for name in ("q", "k", "v", "relative_bias")))
    for name, result, exact in zip(names, found, wanted, strict=False):
        bound = forward_bound if name == "the output" else gradient_bound
        error = _size(result.double().cpu() - exact) / max(_size(exact), smallest)
        if not error <= bound:
            what = ", ".join(f"{field}={value}" for field, value in zip(kind._fields, kind, strict=True))
            return f"{name} differs from the reference's by {error:.2g} (relative RMS; allowed: {bound:g}) for {what}"
    return AGREES


def _size(t: Tensor) -> float:
    return float(t.square().mean().sqrt())


def _small_problem(kind: Kind) -> tuple[Tensor, AttentionInputs, AttentionOptions]:
    """The output's gradient, inputs and options, in numbers that every arithmetic holds exactly."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16().double()

    mask = torch.rand((BATCH, 1, QUERIES, KEYS), generator=generator, device="cpu") > 0.3
    mask[:, :, 3] = False
    inputs = AttentionInputs(
        normal(BATCH, kind.heads, QUERIES, kind.qk_width),
        normal(BATCH, kind.heads, KEYS, kind.qk_width),
        normal(BATCH, kind.heads, KEYS, kind.v_width),
        mask if kind.masked else None,
        relative_bias=normal(kind.heads, QUERIES + KEYS - 1) if kind.band else None,
    )
    options = AttentionOptions(
        causal=kind.causal,
        scale=kind.qk_width**-0.5,
        norm=kind.norm,
        value_net=kind.value_net,
        pooling=kind.pooling,
        dropout=0.25 if kind.dropout else 0.0,
        dropout_seed=2**40 + 7,
        query_offset=KEYS - QUERIES,
    )
    return normal(BATCH, kind.heads, QUERIES, kind.v_width), inputs, options


def _by_reference(grad: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> list[Tensor]:
    """Output and gradients in float64."""
    differentiable = [t.requires_grad_() for t in inputs if t is not None and t.is_floating_point()]
    out = reference.hyper_attention(inputs, options)
    return [out.detach(), *torch.autograd.grad(out, differentiable, grad)]


@torch.no_grad()
def _by_kernels(
    grad: Tensor, inputs: AttentionInputs, options: AttentionOptions, kind: Kind, device: torch.device
) -> list[Tensor]:
    """Into buffers of NaN, so that a cell that is not written shows; with the tiles of the first guess."""
    dtype = torch.float32 if kind.arithmetic == "tf32" else getattr(torch, kind.arithmetic)
    inputs, grad = inputs.to(dtype, device), grad.to(device, dtype)

    def unwritten(t: Tensor | None) -> Any:
        return None if t is None else torch.full_like(t, float("nan"))

    gradients = AttentionGradients(*map(unwritten, (inputs.q, inputs.k, inputs.v, None, inputs.relative_bias)))
    out, shape = unwritten(grad), backend.saved_shape(BATCH, kind.heads, QUERIES, kind.norm)
    saved = torch.full(shape, float("nan"), dtype=torch.float32, device=device)
    before = tuning.MEASURING.set(False)
    try:
        backend.forward(inputs, options, out=out, saved=saved)
        backend.backward(grad, inputs, options, out=out, saved=saved, gradients=gradients)
    finally:
        tuning.MEASURING.reset(before)
    return [t for t in (out, *gradients) if t is not None]


def _arithmetic(problem: Problem) -> str:
    widest = max(problem.qk_width, problem.v_width)
    on_matrix_units = problem.heads <= plan.MOST_HEADS_WIDE and widest >= plan.WIDE_FROM
    if problem.dtype == torch.float32 and on_matrix_units and tuning.float32_precision() == "tf32":
        return "tf32"
    return str(problem.dtype).removeprefix("torch.")


@functools.cache
def environment(device: torch.device) -> dict[str, str]:
    """What an outcome holds for: device, driver, versions."""
    name, driver = "the CPU, by Triton's interpreter", "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} (compute capability {properties.major}.{properties.minor})"
        driver = driver_version()
    digest = hashlib.sha256()
    for path in sources("ops"):
        digest.update(path.name.encode() + path.read_bytes())
    versions = {"torch": torch.__version__, "triton": importlib.metadata.version("triton")}
    return {"device": name, "driver": driver, **versions, "sources": digest.hexdigest()}


def _identity(kind: Kind, device: torch.device) -> str:
    return json.dumps([environment(device), kind._asdict()])


def _remembered(kind: Kind, device: torch.device) -> str | None:
    if (kind, device) not in _outcomes and (outcome := _read(_identity(kind, device))) is not None:
        _outcomes[kind, device] = outcome
    return _outcomes.get((kind, device))


def _file(identity: str) -> Path | None:
    """Where an outcome is kept; None if others may write there."""
    folder = os.environ.get("HEADCODE_CACHE_DIR")
    if not folder:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "headcode")
    private = private_folder(Path(folder) / "gpu-checks", "Comparisons of GPU kernels")
    return None if private is None else private / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _read(identity: str) -> str | None:
    """An outcome from an earlier process; a file that is missing, damaged or another's is none."""
    with suppress(OSError, ValueError, RuntimeError):
        if path := _file(identity):
            found = read_object(path)
            if found.get("identity") == identity and isinstance(found.get("outcome"), str):
                return found["outcome"]
    return None


def _write(identity: str, outcome: str) -> None:
    """For later processes; where that is not possible, they compare again."""
    with suppress(OSError, RuntimeError):
        if path := _file(identity):
            replace_file(path, to_json({"identity": identity, "outcome": outcome}))
