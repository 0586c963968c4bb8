"""What the kernels of a fused block are to do: planned once for a block's sizes, then bound to memory at every step.

Forward: weights are packed into panels; LayerNorm and projections; attention; everything from the heads' outputs on.
Backward: the same the other way round, each kernel followed by a sum of what its tasks have summed up. Parameters have
the names of the block's state_dict; a section of that name is the parameter itself.
"""

import functools
import math
from typing import Any, NamedTuple

import torch

from headcode.ops.cpu import records
from headcode.ops.cpu.attention_plan import AttentionPlan, band_length, saved_shape
from headcode.ops.cpu.launch import Area, Program, Section, Word, contiguous, record
from headcode.ops.cpu.library import KernelName
from headcode.ops.cpu.records import NUMBERS_PER_WORD, Products
from headcode.ops.options import AttentionOptions

MOST_TASKS, LEAST_TASKS = 16, 4
MOST_CHUNK = 128
"""Tokens that a task works on together; more would not stay in a core's cache."""
LEAST_TOKENS = 64
"""A task with fewer tokens would spend its time on its own copy of the weights' gradients."""
MOST_PARTS = 2**24
"""Numbers in all such copies together, unless LEAST_TASKS tasks need more: to add them up takes its time too."""


class BlockSizes(NamedTuple):
    """All that a plan depends on."""

    batch: int
    length: int
    dim: int
    qk_width: int
    v_width: int
    inner_width: int
    num_heads: int
    first: int
    """The first query; with `last`, the range whose outputs are computed."""
    last: int
    gated: bool
    has_band: bool
    has_mask: bool
    """Of keys: (batch, length), not 0 where one may be seen."""
    rotary: bool
    kept: bool
    """Whether a backward pass will follow."""
    epsilons: tuple[float, float]
    """Of the two LayerNorms."""
    products: Products
    attention: AttentionOptions
    """Its seed is 0: that of a step is bound with the memory."""

    @property
    def taken(self) -> int:
        return self.last - self.first

    @property
    def hidden_width(self) -> int:
        return 2 * self.inner_width if self.gated else self.inner_width


class Panels(NamedTuple):
    """Weights, one above the other, as the products forward and backward read them (see `records.PACKING_JOB`)."""

    rows: dict[str, int]
    """Of each weight, by its name."""
    columns: int
    forward: Section
    backward: Section | None


class Projection(NamedTuple):
    """Queries, keys and values by one product; where few queries are read, theirs is another."""

    widths: dict[str, int]
    """Of each part, by its name: attention.query_proj, …"""
    chosen: bool
    """Whether of those tokens alone whose outputs are computed."""
    panels: Panels
    bias: Section
    """(width)"""
    projected: Section
    """(batch, length, width), as its gradient"""
    grad_projected: Section
    statistics: Section
    """(batch, length, 2), of the LayerNorm before it"""

    @property
    def width(self) -> int:
        return sum(self.widths.values())


class BlockPlan:
    """Sections of memory and programs for one pass forward and one backward."""

    def __init__(self, sizes: BlockSizes) -> None:
        self.sizes = sizes
        self.kept, self.scratch, self.sums = Area("kept"), Area("scratch"), Area("sums")
        self._plan_memory()
        self.gradients: dict[str, list[Section]] = {}
        """Of each parameter, the sections of `sums` whose sum is its gradient."""
        self.forward, self.backward = Program(), Program()
        self._plan_forward(self.forward)
        if sizes.kept:
            self._plan_backward(self.backward)
            self.backward.compile_beside()

    def _plan_memory(self) -> None:
        """What the forward pass fills, most of which is kept for the backward pass; and what only that needs."""
        sizes, kept, scratch = self.sizes, self.kept, self.scratch
        tokens = (sizes.batch, sizes.taken)
        widths = dict(zip(("query", "key", "value"), (sizes.qk_width, sizes.qk_width, sizes.v_width), strict=True))
        widths = {f"attention.{name}_proj": width for name, width in widths.items()}
        query = {name: widths[name] for name in list(widths)[:1]}
        others = {name: widths[name] for name in list(widths)[1:]}
        pruned = sizes.taken != sizes.length
        self.projections = [self._projection(query, True), self._projection(others, False)] if pruned else []
        self.projections = self.projections or [self._projection(widths, False)]
        hidden_names = ("gate_proj", "signal_proj") if sizes.gated else ("hidden_proj",)
        self.output = self._panels({"attention.output_proj.weight": sizes.dim}, sizes.v_width)
        self.hidden_weights = {f"feedforward.{name}.weight": sizes.inner_width for name in hidden_names}
        self.hidden_panels = self._panels(self.hidden_weights, sizes.dim)
        self.inner = self._panels({"feedforward.output_proj.weight": sizes.dim}, sizes.inner_width)
        self.statistics = kept.take(*tokens, 2)
        self.attended, self.grad_attended = kept.take(*tokens, sizes.v_width), scratch.take(*tokens, sizes.v_width)
        self.middle, self.grad_middle = _named("out"), scratch.take(*tokens, sizes.dim)
        self.hidden: Section | int = 0
        if sizes.kept:
            self.middle, self.hidden = kept.take(*tokens, sizes.dim), kept.take(*tokens, sizes.hidden_width)
        self.zeros = kept.take(max(sizes.hidden_width, sizes.dim)) if sizes.gated else None
        """In place of the biases that a gated feed-forward does not have."""
        self.band = None
        if sizes.has_band:
            self.band = kept.take(sizes.num_heads, band_length(sizes.taken, sizes.length))
        tensors = {
            **self._heads("", [projection.projected for projection in self.projections]),
            **self._heads("grad_", [projection.grad_projected for projection in self.projections]),
            "out": self.attended.by_head(sizes.num_heads, 0, sizes.v_width),
            "grad": self.grad_attended.by_head(sizes.num_heads, 0, sizes.v_width),
            "saved": kept.take(*saved_shape(sizes.batch, sizes.num_heads, sizes.taken, sizes.attention.norm)),
        }
        if self.band is not None:
            tensors["band"] = self.band
        if sizes.has_mask:
            strides = (sizes.length, 0, 0, 1)
            tensors["mask"] = Section("mask", 0, (sizes.batch, 1, 1, sizes.length), strides, torch.bool)
        self.attention = AttentionPlan(tensors, sizes.attention)

    def _projection(self, widths: dict[str, int], chosen: bool) -> Projection:
        sizes, width = self.sizes, sum(widths.values())
        tokens = (sizes.batch, sizes.taken if chosen else sizes.length)
        return Projection(
            widths,
            chosen,
            panels=self._panels({f"{name}.weight": rows for name, rows in widths.items()}, sizes.dim),
            bias=self.kept.take(width),
            projected=self.kept.take(*tokens, width),
            grad_projected=self.scratch.take(*tokens, width),
            statistics=self.kept.take(*tokens, 2),
        )

    def _panels(self, rows: dict[str, int], columns: int) -> Panels:
        shape = (sum(rows.values()), columns // NUMBERS_PER_WORD[self.sizes.products])
        return Panels(rows, columns, self.kept.take(*shape), self.kept.take(*shape) if self.sizes.kept else None)

    def _heads(self, prefix: str, projected: list[Section]) -> dict[str, Section]:
        """q, k and v (B, H, T, D) where the projections have them, joined or the queries apart."""
        heads, qk_width, v_width = self.sizes.num_heads, self.sizes.qk_width, self.sizes.v_width
        first_key = 0 if len(projected) > 1 else qk_width
        return {
            f"{prefix}q": projected[0].by_head(heads, 0, qk_width),
            f"{prefix}k": projected[-1].by_head(heads, first_key, qk_width),
            f"{prefix}v": projected[-1].by_head(heads, first_key + qk_width, v_width),
        }

    def _plan_forward(self, program: Program) -> None:
        self._plan_packing(program)
        for index, projection in enumerate(self.projections):
            self._launch(
                program,
                f"project {index}",
                "block_forward.project_kernels",
                **self._tokens(projection.chosen),
                **self._norm("attention_norm", projection.statistics),
                **self._rotary(projection),
                width=projection.width,
                weight=projection.panels.forward,
                bias=projection.bias,
                x=_named("x"),
                projected=projection.projected,
            )
        self.attention.plan_forward(program)
        self._launch(
            program,
            "feed",
            "block_forward.feed_kernels",
            **self._feed(),
            x=_named("x"),
            out=_named("out"),
            output_weight=self.output.forward,
            output_bias=_named("attention.output_proj.bias"),
            hidden_weight=self.hidden_panels.forward,
            hidden_bias=self.zeros or _named("feedforward.hidden_proj.bias"),
            inner_weight=self.inner.forward,
            inner_bias=self.zeros or _named("feedforward.output_proj.bias"),
        )

    def _plan_packing(self, program: Program) -> None:
        """The weights as the products read them, panels for the way forward and for the way back; biases joined."""
        jobs: list[list[Word]] = []

        def pack(name: str, rows: int, columns: int, panels: Section, depth: int = 0, first: int = 0) -> None:
            fields: dict[str, Word] = {"matrix": _named(name), "rows": rows, "columns": columns, "panels": panels}
            jobs.append(record(records.PACKING_JOB, **fields, depth=depth, first=first))

        for panels in (*(p.panels for p in self.projections), self.output, self.hidden_panels, self.inner):
            depth, columns, first = sum(panels.rows.values()), panels.columns, 0
            parts = panels.forward.split(*panels.rows.values())
            for (name, rows), part in zip(panels.rows.items(), parts, strict=True):
                pack(name, rows, columns, part)
                if panels.backward is not None:
                    pack(name, rows, columns, panels.backward, depth, first)
                first += rows
        for projection in self.projections:
            parts = projection.bias.split(*projection.widths.values())
            for (name, width), part in zip(projection.widths.items(), parts, strict=True):
                pack(f"{name}.bias", 1, width, part, depth=1)  # a matrix of one row stays as it is
        words = [*record(records.PACKING), *(word for job in jobs for word in job)]
        program.launch("pack", KernelName("gemm", "pack_kernels", self.sizes.products), words, len(jobs))

    def _plan_backward(self, program: Program) -> None:
        dim, sizes = self.sizes.dim, self.sizes
        hidden = {name: (rows, dim) for name, rows in self.hidden_weights.items()}
        self._launch_summed(
            program,
            "feed",
            {
                "feedforward.output_proj.weight": (dim, sizes.inner_width),
                **hidden,
                "attention.output_proj.weight": (dim, sizes.v_width),
                "feedforward.output_proj.bias": (dim,),
                "attention.output_proj.bias": (dim,),
                "feedforward_norm.weight": (dim,),
                "feedforward_norm.bias": (dim,),
                "feedforward.hidden_proj.bias": (sizes.hidden_width,),
            },
            **self._feed(),
            grad_out=_named("grad_out"),
            grad_middle=self.grad_middle,
            grad_attended=self.grad_attended,
            output_weight=self.output.backward,
            hidden_weight=self.hidden_panels.backward,
            inner_weight=self.inner.backward,
        )
        self.attention.plan_backward(program, self.scratch, band_needs_grad=self.band is not None)
        for index, projection in enumerate(self.projections):
            self._launch_summed(
                program,
                f"project {index}",
                {
                    **{f"{name}.weight": (width, dim) for name, width in projection.widths.items()},
                    "attention_norm.weight": (dim,),
                    "attention_norm.bias": (dim,),
                    **{f"{name}.bias": (width,) for name, width in projection.widths.items()},
                },
                **self._tokens(projection.chosen),
                **self._norm("attention_norm", projection.statistics),
                **self._rotary(projection),
                x=_named("x"),
                width=projection.width,
                weight=projection.panels.backward,
                grad_projected=projection.grad_projected,
                grad_middle=self.grad_middle if index == 0 else 0,
                grad_x=_named("grad_x"),
                # First all tokens, then what the chosen ones add.
                grad_x_begun=int(index != len(self.projections) - 1),
            )

    def _launch_summed(self, program: Program, name: str, shapes: dict[str, tuple[int, ...]], **fields: Any) -> None:
        """A kernel whose tasks sum up gradients of these shapes, and the launch that adds up what they have."""
        size = sum(math.prod(shape) for shape in shapes.values())
        num_tasks, _ = share_out(fields["tokens"], size)
        parts, total = self.scratch.take(num_tasks, size), self.sums.take(size)
        kernel_name = f"block_backward.{name.split()[0]}_backward_kernels"
        self._launch(program, name, kernel_name, **fields, parts=parts, part_size=size)
        program.launch_sum(f"sum of {name}", parts, total)
        start = total.start
        for parameter, shape in shapes.items():
            self.gradients.setdefault(parameter, []).append(contiguous("sums", start, shape))
            start += math.prod(shape)

    def _launch(self, program: Program, name: str, kernel_name: str, **fields: Any) -> None:
        num_tasks, task_tokens = share_out(fields["tokens"], fields.get("part_size", 0))
        fields |= {"dim": self.sizes.dim, "task_tokens": task_tokens, "chunk": chunk_of(task_tokens)}
        words = record(records.BLOCK_PART, **fields)
        module, _, kernels = kernel_name.partition(".")
        program.launch(name, KernelName(module, kernels, self.sizes.products), words, num_tasks)

    def _tokens(self, chosen: bool) -> dict[str, int]:
        sizes = self.sizes
        taken, first = (sizes.taken, sizes.first) if chosen else (sizes.length, 0)
        return {"tokens": sizes.batch * taken, "taken": taken, "length": sizes.length, "first": first}

    def _norm(self, name: str, statistics: Section) -> dict[str, Any]:
        epsilon = self.sizes.epsilons[name == "feedforward_norm"]
        return {
            "statistics": statistics,
            "norm_weight": _named(f"{name}.weight"),
            "norm_bias": _named(f"{name}.bias"),
            "epsilon": float(epsilon),  # a whole number would be written as one
        }

    def _rotary(self, projection: Projection) -> dict[str, Any]:
        if not self.sizes.rotary:
            return {}
        turned = ("attention.query_proj", "attention.key_proj")
        return {
            "angles": _named("angles"),
            "head_width": self.sizes.qk_width // self.sizes.num_heads,
            "rotated_width": sum(width for name, width in projection.widths.items() if name in turned),
        }

    def _feed(self) -> dict[str, Any]:
        """What both directions of the second half read."""
        return {
            **self._tokens(True),
            **self._norm("feedforward_norm", self.statistics),
            "attended_width": self.sizes.v_width,
            "hidden_width": self.sizes.hidden_width,
            "inner_width": self.sizes.inner_width,
            "attended": self.attended,
            "middle": self.middle,
            "hidden": self.hidden,
        }


@functools.lru_cache(maxsize=64)
def plan_block(sizes: BlockSizes) -> BlockPlan:
    """A model's blocks share their plans; training has one or two, evaluation and odd batches a few more."""
    return BlockPlan(sizes)


def _named(memory: str) -> Section:
    """All of a tensor that kernels know the shape of."""
    return Section(memory, 0, (), ())


def share_out(tokens: int, part_size: int) -> tuple[int, int]:
    """How many tasks, and tokens of each. By the shape alone: threads must not change what is summed with what."""
    most = max(LEAST_TASKS, min(MOST_TASKS, MOST_PARTS // max(part_size, 1)))
    num_tasks = max(1, min(most, tokens // LEAST_TOKENS))
    size = -(-tokens // num_tasks)
    return -(-tokens // size), size


def chunk_of(tokens: int) -> int:
    """Tokens of a chunk: all chunks of a task have about as many, in whole tiles of a product."""
    num_chunks = -(-tokens // MOST_CHUNK)
    return -(-tokens // (8 * num_chunks)) * 8
