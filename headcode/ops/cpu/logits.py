"""The end of a language model as one autograd function, on a CPU: LayerNorm, and the product with the tokens' table.

It is a block's projection (`block_forward.project_kernels`) with a vocabulary for its width. The factor goes into the
LayerNorm's weight and bias, where it costs nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.ops.cpu import records
from headcode.ops.cpu.block_plan import chunk_of, share_out
from headcode.ops.cpu.launch import Area, Program, Section, Word, contiguous, record
from headcode.ops.cpu.library import KernelName
from headcode.ops.cpu.records import NUMBERS_PER_WORD, Products

PACKED_ROWS = 512
"""Rows of the table that one task brings into panels."""
STRIPE = 128
"""Rows of the table whose gradients one task sums up, in a core's cache."""


class LogitsCall(NamedTuple):
    """What is to be computed, besides its numbers."""

    epsilon: float
    """Of the LayerNorm."""
    factor: float
    products: Products


def token_logits(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, table: Tensor, call: LogitsCall) -> Tensor:
    """LN(x) · tableᵀ · factor: (…, dim) and (vocabulary, dim) to (…, vocabulary); float32, contiguous."""
    inputs = (x, norm_weight, norm_bias, table)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return _forward(inputs, call, kept=False)[0]
    return _Logits.apply(*inputs, call)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, ctx.call = arguments
        out, kept = _forward(inputs, ctx.call, kept=True)
        ctx.save_for_backward(*inputs, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            found: tuple[Any, ...] = _differentiable_gradients(inputs, grad, ctx.call)
        else:
            found = _backward(inputs, grad.contiguous().resolve_neg(), kept, ctx.call)
        needs = ctx.needs_input_grad
        return (*(g if need else None for g, need in zip(found, needs, strict=False)), None)


def _differentiable_gradients(inputs: Sequence[Tensor], grad: Tensor, call: LogitsCall) -> tuple[Any, ...]:
    """For gradients that are to be differentiated themselves."""
    x, norm_weight, norm_bias, table = inputs
    normed = torch.nn.functional.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, call.epsilon)
    out = normed @ (table.T * call.factor)
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if t.requires_grad else None for t in inputs)


class _Plan(NamedTuple):
    kept: Area
    scratch: Area
    zeros: Section
    forward: Program
    backward: Program
    norm_gradients: Section
    """(2, dim): of weight and bias, of the LayerNorm with the factor in it."""


@functools.lru_cache(maxsize=64)
def _plan(tokens: int, dim: int, vocabulary: int, epsilon: float, kept: bool, products: Products) -> _Plan:
    """The weight and bias of the LayerNorm are bound together, as `norm` (2, dim), with the factor in them."""
    area, scratch, forward, backward = Area("kept"), Area("scratch"), Program(), Program()
    statistics, zeros = area.take(tokens, 2), area.take(vocabulary)
    words = dim // NUMBERS_PER_WORD[products]
    panels = area.take(vocabulary, words), area.take(vocabulary, words) if kept else None
    _plan_packing(forward, vocabulary, dim, products, *panels)
    norm = contiguous("norm", 0, (2, dim))
    norm_weight, norm_bias = norm.split(1, 1)
    sums = scratch.take(2, dim)
    given: dict[str, Word] = {
        **{"tokens": tokens, "taken": tokens, "length": tokens, "dim": dim, "width": vocabulary},
        **{"x": Section("x", 0, (), ()), "statistics": statistics, "epsilon": float(epsilon)},
        **{"norm_weight": norm_weight, "norm_bias": norm_bias},
    }

    def launch(program: Program, name: str, kernel_name: str, num_tasks: int, **fields: Word) -> None:
        words = record(records.BLOCK_PART, **given, **fields)
        module, _, kernels = kernel_name.partition(".")
        program.launch(name, KernelName(module, kernels, products), words, num_tasks)

    num_tasks, size = share_out(tokens, 0)
    out, grad, grad_x, grad_table = (Section(name, 0, (), ()) for name in ("out", "grad", "grad_x", "grad_table"))
    project = "block_forward.project_kernels"
    launch(
        forward,
        "project",
        project,
        num_tasks,
        task_tokens=size,
        chunk=chunk_of(size),
        weight=panels[0],
        bias=zeros,
        projected=out,
    )
    if panels[1] is not None:
        parts = scratch.take(num_tasks, 2 * dim)
        for_tokens: dict[str, Word] = {"task_tokens": size, "chunk": chunk_of(size), "weight": panels[1]}
        for_tokens |= {"grad_projected": grad, "grad_x": grad_x, "parts": parts, "part_size": 2 * dim}
        for_table: dict[str, Word] = {"task_tokens": STRIPE, "chunk": chunk_of(tokens), "parts": grad_table}
        for_table |= {"grad_projected": grad}
        num_stripes = -(-vocabulary // STRIPE)
        launch(backward, "tokens", "logits_backward.tokens_backward_kernels", num_tasks, **for_tokens)
        backward.launch_sum("sum of norms", parts, sums)
        launch(backward, "table", "logits_backward.table_backward_kernels", num_stripes, **for_table)
    return _Plan(area, scratch, zeros, forward, backward, sums)


def _plan_packing(
    program: Program, vocabulary: int, dim: int, products: Products, forward: Section, backward: Section | None
) -> None:
    jobs: list[Word] = []
    for first in range(0, vocabulary, PACKED_ROWS):
        rows = min(PACKED_ROWS, vocabulary - first)
        matrix: dict[str, Word] = {"matrix": Section("table", first * dim, (), ()), "rows": rows, "columns": dim}
        part = forward._replace(start=forward.start + first * forward.strides[0])
        jobs += record(records.PACKING_JOB, **matrix, panels=part)
        if backward is not None:
            jobs += record(records.PACKING_JOB, **matrix, panels=backward, depth=vocabulary, first=first)
    num_jobs = len(jobs) // len(records.PACKING_JOB.names or ())
    program.launch("pack", KernelName("gemm", "pack_kernels", products), [*record(records.PACKING), *jobs], num_jobs)


def _bind_norm(inputs: Sequence[Tensor], factor: float) -> Tensor:
    _, weight, bias, _ = inputs
    return torch.stack((weight.detach(), bias.detach())).mul_(factor)


def _forward(inputs: Sequence[Tensor], call: LogitsCall, *, kept: bool) -> tuple[Tensor, Tensor]:
    """The logits, and what the backward pass needs besides the inputs."""
    x, _, _, table = inputs
    vocabulary, dim = table.shape
    plan = _plan(x.numel() // dim, dim, vocabulary, call.epsilon, kept, call.products)
    filled, out = x.new_empty(plan.kept.size), x.new_empty(*x.shape[:-1], vocabulary)
    memory = {"x": x, "table": table, "norm": _bind_norm(inputs, call.factor), "kept": filled, "out": out}
    program = plan.forward.bind(memory)
    program.view(plan.zeros).zero_()
    program.run("pack")
    program.run("project")
    return out, filled


def _backward(
    inputs: Sequence[Tensor], grad: Tensor, kept: Tensor, call: LogitsCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias of the LayerNorm, and table."""
    x, _, _, table = inputs
    vocabulary, dim = table.shape
    plan = _plan(x.numel() // dim, dim, vocabulary, call.epsilon, True, call.products)
    grad_x, grad_table, scratch = torch.empty_like(x), torch.empty_like(table), x.new_empty(plan.scratch.size)
    memory = {"x": x, "norm": _bind_norm(inputs, call.factor), "kept": kept, "scratch": scratch}
    program = plan.backward.bind({**memory, "grad": grad, "grad_x": grad_x, "grad_table": grad_table})
    for name in ("tokens", "sum of norms", "table"):
        program.run(name)
    grad_weight, grad_bias = (program.view(plan.norm_gradients) * call.factor).unbind(0)
    return grad_x, grad_weight, grad_bias, grad_table
