"""`GraphConfig`: the sizes and choices of a GraphNetwork."""

import dataclasses
from typing import ClassVar, Literal

from headcode.nn.checks import check_sizes, resolve_method
from headcode.nn.config import ModelConfig
from headcode.ops import VALUE_NETS

_NOT_ON_GRAPHS = {
    "input_dim": None,
    "position": "none",
    "position_period": None,
    "causal": False,
    "qk_norm": False,
    "num_experts": 1,
    "cross_layers": 0,
    "auxiliary_dims": (),
    "recurrent": False,
}
"""Fields of sequences, each with the one value that it has here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphConfig(ModelConfig):
    """The sizes and choices of a GraphNetwork, in the words of a Transformer's.

    `vocab_size` is the number of relations that an edge can have, 0 for no edge; `max_length` that of nodes.
    """

    kind: ClassVar[str] = "graph_network"
    poolings: ClassVar[tuple[str, ...]] = ("sum", "mean", "max", "min", "std", "sum+max", "mean+max", "sum+mean+max")

    pooling: str = "sum"
    """Over the edges into a node: sum, mean, max, min, std, or several side by side, such as sum+max."""
    position: str = "none"
    layer: Literal["hyper", "gatv2"] = "hyper"
    """hyper: HyperConv with the method. gatv2: PyTorch Geometric's GATv2Conv, whose norm and value net are its own."""

    edge_values: bool = False
    """Whether the relation of an edge is added to the values too; if not, it acts through the code alone, as in
    GATv2Conv."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in _NOT_ON_GRAPHS.items():
            if (given := getattr(self, name)) != only:
                raise ValueError(f"{name} is not for models of graphs: leave it out, got {given!r}.")
        if self.output_dim is None:
            raise ValueError("A model of graphs needs output_dim.")
        if self.layer != "hyper" and self.method != "softmax":
            raise ValueError(
                f"The layer {self.layer} has a norm and a value net of its own, most like those of the method softmax: "
                f"use method='softmax' with it, got {self.method!r}."
            )
        if self.layer == "gatv2" and ("+" in self.pooling or self.attention_dropout):
            raise ValueError("GATv2Conv is used with one pooling and without attention dropout: leave the others out.")
        if self.layer == "gatv2" and self.edge_values:
            raise ValueError("The messages of GATv2Conv do not have the relation of their edge: use edge_values=False.")
        check_sizes({"qk_dim": self.qk_dim, "v_dim": self.v_dim, "num_heads": self.num_heads})

    @property
    def attention_layers(self) -> int:
        return 0 if self.layer == "gatv2" else self.num_layers

    def forward_flops(self, length: int, queries: slice | None = None) -> int:
        """FLOPs of one graph of `length` nodes, counted for a tree with self-loops: two edges a node."""
        net = VALUE_NETS[resolve_method(self.method, self.norm, self.value_net)[1]]
        value_dim = 2 * self.v_dim if net.gated else self.v_dim
        edges, feedforward = 2 * length, {"gelu": 2, "swiglu": 3}[self.feedforward] * self.dim * self.mlp_dim
        poolings = len(self.pooling.split("+"))
        node = self.dim * (2 * self.qk_dim + value_dim + poolings * self.v_dim) + feedforward
        edge = self.dim * (self.qk_dim + value_dim * self.edge_values) + self.qk_dim + self.v_dim
        edge += 0 if net.activation is None else value_dim
        read = len(range(length)[queries or slice(None)]) * self.dim * (self.output_dim or 0)
        return 2 * (self.num_layers * (length * node + edges * edge) + read)

    @property
    def num_parameters(self) -> int:
        """How many numbers the model learns."""
        assert self.vocab_size is not None
        assert self.output_dim is not None
        poolings = len(self.pooling.split("+"))
        net = VALUE_NETS[resolve_method(self.method, self.norm, self.value_net)[1]]
        values = 2 * self.v_dim if net.gated else self.v_dim
        if self.layer == "gatv2":
            # Projections of both ends of an edge and of its relation, three biases, and a vector for the scores.
            attention = (3 * self.dim + 4) * self.v_dim
        else:
            attention = (self.dim + 1) * (2 * self.qk_dim + values) + self.dim * (
                self.qk_dim + values * self.edge_values
            )
            attention += self.v_dim * (self.v_dim // self.num_heads + 1) if net.middle else 0
        attention += (poolings * self.v_dim + 1) * self.dim
        feedforward = (3 if self.feedforward == "swiglu" else 2) * self.dim * self.mlp_dim
        feedforward += self.dim + self.mlp_dim if self.feedforward == "gelu" else 0
        blocks = (1 if self.share_layers else self.num_layers) * (attention + feedforward + 4 * self.dim)
        return 2 * self.dim * self.vocab_size + blocks + 2 * self.dim + (self.dim + 1) * self.output_dim
