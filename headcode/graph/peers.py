"""PyTorch Geometric's own attention layers, called as HyperConv is."""

from torch import Tensor, nn

from headcode.nn.initialisation import reset_linear

try:
    from torch_geometric.nn import GATv2Conv
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'Graph layers need PyTorch Geometric, which is not installed: pip install "headcode[graph]".'
    ) from None


class Gatv2(nn.Module):
    """GATv2Conv with heads of width v_dim / num_heads, and the output projection that HyperConv has.

    Its norm is a softmax over the edges into a node, of scores that a nonlinearity and a vector make from both ends; it
    has no codes that could be captured.
    """

    def __init__(self, dim: int, num_heads: int, *, v_dim: int, edge_dim: int, pooling: str) -> None:
        super().__init__()
        width = v_dim // num_heads
        self.conv = GATv2Conv(dim, width, num_heads, edge_dim=edge_dim, add_self_loops=False, aggr=pooling)
        self.output_proj = nn.Linear(v_dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()
        reset_linear(self.output_proj)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor,
        *,
        graphs: int | None = None,
        dropout_seed: int | None = None,
        use: int = 0,
    ) -> Tensor:
        return self.output_proj(self.conv(x, edge_index, edge_attr))
