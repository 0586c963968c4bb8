"""`GraphNetwork`: pre-norm blocks of a graph layer and a feed-forward, over small graphs given as tensors."""

import math

import torch
from torch import Tensor, nn

from headcode.graph.config import GraphConfig
from headcode.graph.conv import HyperConv
from headcode.graph.peers import Gatv2
from headcode.nn.checks import check_queries
from headcode.nn.feedforward import FEEDFORWARDS
from headcode.nn.initialisation import reset_linear
from headcode.nn.transformer import NORM_EPSILON, layer_seed

_SAME_NAMES = ("method", "norm", "value_net", "qk_dim", "v_dim", "edge_values")
"""Fields of a GraphConfig that are arguments of HyperConv under the same name."""


class GraphBlock(nn.Module):
    """x + layer(LN(x), edges), then x + feedforward(LN(x))."""

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.attention: HyperConv | Gatv2
        if config.layer == "gatv2":
            self.attention = Gatv2(
                config.dim, config.num_heads, v_dim=config.v_dim, edge_dim=config.dim, pooling=config.pooling
            )
        else:
            options = {name: getattr(config, name) for name in _SAME_NAMES}
            options |= {"edge_dim": config.dim, "dropout": config.attention_dropout}
            poolings = config.pooling.split("+")
            pooling = poolings[0] if len(poolings) == 1 else poolings
            self.attention = HyperConv(config.dim, config.num_heads, pooling=pooling, **options)
        self.feedforward_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.feedforward = FEEDFORWARDS[config.feedforward](config.dim, config.mlp_dim, config.backend)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, dropout_seed: int | None = None, use: int = 0
    ) -> Tensor:
        """(B, nodes, dim) to the same shape; edges are numbered through all B graphs."""
        tokens = self.attention_norm(x).flatten(0, 1)
        options = {"graphs": x.shape[0] or None, "dropout_seed": dropout_seed, "use": use}
        x = x + self.attention(tokens, edge_index, edge_attr, **options).view_as(x)
        return x + self.feedforward(self.feedforward_norm(x))


class GraphNetwork(nn.Module):
    """The model of tasks on graphs, from a `GraphConfig`.

    A batch of graphs is one tensor of integers (B, nodes, nodes): [b, i, j] is the relation of the edge from node j to
    node i, or 0 if there is none. A node that exists has a self-loop, whose relation says what kind of node it is.
    Nodes have no positions: any other order of them gives the same outputs in that order.

    Example:
        >>> model = GraphNetwork(GraphConfig(vocab_size=5, output_dim=3, max_length=4))
        >>> model(torch.randint(5, (2, 4, 4)), queries=slice(-1, None)).shape
        torch.Size([2, 1, 3])
    """

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        if not isinstance(config, GraphConfig):
            raise TypeError(f"GraphNetwork is made from a GraphConfig, got {type(config).__name__}.")
        assert config.vocab_size is not None
        assert config.output_dim is not None
        self.config = config
        self.node_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.edge_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(GraphBlock(config) for _ in range(1 if config.share_layers else config.num_layers))
        self.final_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.output_proj = nn.Linear(config.dim, config.output_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.node_embedding, self.edge_embedding):
            nn.init.normal_(table.weight, std=math.sqrt(1 / self.config.dim))
        for block in self.blocks:
            for part in block.children():
                part.reset_parameters()  # type: ignore[operator]
        self.final_norm.reset_parameters()
        reset_linear(self.output_proj)

    def layers(self) -> list[GraphBlock]:
        """The block of each layer, in order; one block many times when layers are shared."""
        blocks = [block for block in self.blocks if isinstance(block, GraphBlock)]
        return blocks * self.config.num_layers if self.config.share_layers else blocks

    def layer_blocks(self) -> list[nn.Module]:
        """The block of each layer with codes."""
        return [block for block in self.layers() if isinstance(block.attention, HyperConv)]

    def attention_layers(self) -> list[HyperConv]:
        """The layers with codes, in order of use; none if the layers are a peer's."""
        return [block.attention for block in self.layers() if isinstance(block.attention, HyperConv)]

    def forward(self, x: Tensor, *, queries: slice | None = None, dropout_seed: int | None = None) -> Tensor:
        """Outputs (B, nodes, output_dim), or of the nodes in `queries` alone."""
        self.check_input(x)
        check_queries(queries, x.shape[1])
        graph, target, source = x.nonzero().T
        edge_index = torch.stack((graph * x.shape[1] + source, graph * x.shape[1] + target))
        edge_attr = self.edge_embedding(x[graph, target, source])
        hidden = self.node_embedding(x.diagonal(dim1=1, dim2=2))
        for index, block in enumerate(self.layers()):
            use = index if self.config.share_layers else 0
            hidden = block(hidden, edge_index, edge_attr, layer_seed(dropout_seed, index), use)
        return self.output_proj(self.final_norm(hidden if queries is None else hidden[:, queries]))

    def check_input(self, x: Tensor) -> None:
        """Raise unless `forward` can take x."""
        if not isinstance(x, Tensor):
            raise TypeError(f"The input must be a torch.Tensor, got {type(x).__name__}.")
        if x.dim() != 3 or x.shape[1] != x.shape[2] or x.dtype != torch.int64:
            raise ValueError(
                f"Graphs are one int64 tensor (batch, nodes, nodes) of relations, 0 for none; "
                f"got {x.dtype} {tuple(x.shape)}."
            )
        if x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
            low, high = x.aminmax()
            assert self.config.vocab_size is not None
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"Relations must lie in 0..{self.config.vocab_size - 1}, got {low}..{high}.")
