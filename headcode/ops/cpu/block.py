"""A pre-norm transformer block as one autograd function, on a CPU: `fused_block`.

Op by op, a block reads and writes each activation a dozen times, keeps two dozen of them for the backward pass, and
spends a tenth of a small model's step in Python. Here a few kernels do it all, each on a stretch of tokens that stays
in a core's cache: LayerNorm with the projections after it; the attention op, which reads queries, keys and values
where the projection left them and writes their gradients where the projection's backward pass wants them; and
everything from the heads' outputs to the end of the block. Kept are the block's input, the projections, the heads'
outputs, the middle of the residual stream and the hidden layer before its activation; nothing, if no gradient will be
asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.ops import pooling
from headcode.ops.cpu.attention_plan import dropout_stream
from headcode.ops.cpu.block_plan import BlockPlan, BlockSizes, plan_block
from headcode.ops.cpu.records import Products
from headcode.ops.options import AttentionOptions

TABLE = "attention.relative_bias.table"


class BlockCall(NamedTuple):
    """What a block is to do, besides its numbers."""

    num_heads: int
    first: int
    """The first query; with `last`, the range whose outputs are computed."""
    last: int
    gated: bool
    epsilons: tuple[float, float]
    """Of the two LayerNorms."""
    buckets: Tensor | None
    """Bucket of each entry of the relative band (Tq+Tk-1)."""
    angles: Tensor | None
    """Cosines and sines of rotary positions (T, D), float32."""
    visible: Tensor | None
    """(B, T), False where a key is padding."""
    products: Products
    attention: AttentionOptions
    differentiable: Callable[[Tensor, dict[str, Tensor]], Tensor]
    """The same block, op by op, of x and the parameters: for gradients that are to be differentiated themselves."""


def fused_block(x: Tensor, parameters: Mapping[str, Tensor], call: BlockCall) -> Tensor:
    """x + attention(LN(x)) =: m, then m + feedforward(LN(m)): (B, T, dim) to (B, Tq, dim); float32, contiguous.

    The parameters have the names of the block's state_dict.
    """
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters.values()))):
        return _forward(call, x, parameters, kept=False)[0]
    return _Block.apply(call, tuple(parameters), x, *parameters.values())


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BlockCall, names: tuple[str, ...], x: Tensor, *values: Tensor) -> Tensor:
        out, kept = _forward(call, x, dict(zip(names, values, strict=True)), kept=True)
        ctx.save_for_backward(x, *values, kept)
        ctx.call, ctx.names = call, names
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *values, kept = ctx.saved_tensors
        parameters = dict(zip(ctx.names, values, strict=True))
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable_gradients(ctx.call, x, parameters, grad, needs))
        # Kernels read what is in memory: no strides, no sign that is yet to be applied.
        grad_x, gradients = _backward(ctx.call, x, parameters, grad.contiguous().resolve_neg(), kept)
        found = (grad_x, *(gradients[name] for name in ctx.names))
        return (None, None, *(g if need else None for g, need in zip(found, needs, strict=True)))


def _differentiable_gradients(
    call: BlockCall, x: Tensor, parameters: dict[str, Tensor], grad: Tensor, needs: tuple[bool, ...]
) -> list[Tensor | None]:
    out = call.differentiable(x, parameters)
    wanted = [t for t, need in zip((x, *parameters.values()), needs, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


def _plan(call: BlockCall, x: Tensor, parameters: Mapping[str, Tensor], *, kept: bool) -> BlockPlan:
    return plan_block(
        BlockSizes(
            batch=x.shape[0],
            length=x.shape[1],
            dim=x.shape[2],
            qk_width=parameters["attention.query_proj.weight"].shape[0],
            v_width=parameters["attention.value_proj.weight"].shape[0],
            inner_width=parameters["feedforward.output_proj.weight"].shape[1],
            num_heads=call.num_heads,
            first=call.first,
            last=call.last,
            gated=call.gated,
            has_band=call.buckets is not None,
            has_mask=call.visible is not None,
            rotary=call.angles is not None,
            kept=kept,
            epsilons=call.epsilons,
            products=call.products,
            attention=replace(call.attention, dropout_seed=0),
        )
    )


def _memory(call: BlockCall, x: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What both passes read."""
    given = {"x": x, "angles": call.angles, "mask": call.visible}
    return {**parameters, **{name: tensor for name, tensor in given.items() if tensor is not None}}


def _divisor(call: BlockCall, x: Tensor) -> Tensor | None:
    """What pooling divides the heads' outputs by."""
    mask = None if call.visible is None else call.visible[:, None, None]
    return pooling.divisor_of_keys(call.attention, call.last - call.first, x.shape[1], mask, x.new_empty(0))


def _forward(call: BlockCall, x: Tensor, parameters: Mapping[str, Tensor], *, kept: bool) -> tuple[Tensor, Tensor]:
    """The output, and if it is to be kept all that the backward pass needs besides the inputs."""
    plan = _plan(call, x, parameters, kept=kept)
    filled = x.new_empty(plan.kept.size)
    out = x.new_empty(x.shape[0], plan.sizes.taken, x.shape[2])
    memory = {**_memory(call, x, parameters), "out": out, "kept": filled}
    program = plan.forward.bind(memory, dropout_stream=dropout_stream(call.attention))
    if plan.band is not None and call.buckets is not None:
        band = program.view(plan.band).zero_()
        band[:, 1 : 1 + len(call.buckets)] = parameters[TABLE].detach()[:, call.buckets]
    if plan.zeros is not None:
        program.view(plan.zeros).zero_()
    program.run("pack")
    for index in range(len(plan.projections)):
        program.run(f"project {index}")
    plan.attention.run_forward(program, _divisor(call, x))
    program.run("feed")
    return out, filled


def _backward(
    call: BlockCall, x: Tensor, parameters: dict[str, Tensor], grad: Tensor, kept: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of x and, by name, of the parameters."""
    plan = _plan(call, x, parameters, kept=True)
    grad_x, sums = torch.empty_like(x), x.new_empty(plan.sums.size)
    memory = {"kept": kept, "grad_out": grad, "grad_x": grad_x, "sums": sums}
    memory |= {**_memory(call, x, parameters), "scratch": x.new_empty(plan.scratch.size)}
    program = plan.backward.bind(memory, dropout_stream=dropout_stream(call.attention))
    program.run("feed")
    program.run("sum of feed")
    plan.attention.run_backward(program, _divisor(call, x))
    # First all tokens, then what the chosen ones add.
    for index in reversed(range(len(plan.projections))):
        program.run(f"project {index}")
        program.run(f"sum of project {index}")
    gradients = {}
    for name, sections in plan.gradients.items():
        gradient, *others = (program.view(section) for section in sections)
        gradients[name] = sum(others, gradient)
    if plan.attention.grad_band is not None and call.buckets is not None:
        band = program.view(plan.attention.grad_band)[:, 1 : 1 + len(call.buckets)]
        table = torch.zeros_like(parameters[TABLE], memory_format=torch.contiguous_format)
        gradients[TABLE] = table.index_add_(1, call.buckets, band)
    return grad_x, gradients
