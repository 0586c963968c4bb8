"""The hypernetwork view: the weights and biases of the network that a code generates for one (query, key) pair."""

import dataclasses

import torch
from torch import Tensor

from headcode.nn.attention import HyperAttention
from headcode.nn.plain import affine_map
from headcode.ops import VALUE_NETS


@dataclasses.dataclass(frozen=True)
class ValueNetwork:
    """The generated networks of a batch of (query, key) pairs; the leading axes are those of the pairs.

    Linear value nets have one layer, `weights[0]` (…, dim, context_dim); the others two, `relu_relu` three, with the
    value net's activation between them. Calling it applies each pair's network to that pair's key token.

    A net that acts on each head's values (`relu_value`) has two layers too, but only the second one is generated: the
    first, all heads' value projections, is the same for every pair, and a view.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    """The last layer's bias of a net with several is None: the layer adds its output bias once per query."""
    value_net: str

    def __call__(self, x: Tensor) -> Tensor:
        """Contributions (…, dim) of key tokens x (…, context_dim), without the layer's output bias."""
        net = VALUE_NETS[self.value_net]
        activation = net.activation or net.on_values
        *layers, output = zip(self.weights, self.biases, strict=True)
        for weight, bias in layers:
            x = _affine(weight, bias, x)
            assert activation is not None
            if net.gated:
                gate, signal = x.chunk(2, -1)
                x = activation(gate) * signal
            else:
                x = activation(x)
        return _affine(*output, x)


def value_network(layer: HyperAttention, codes: Tensor) -> ValueNetwork:
    """The value networks that `codes` generate in `layer`.

        linear:     W = Σ_h z_h W_out[h] W_value[h],   b = Σ_h z_h W_out[h] b_value[h]
        two-layer:  W₁ = Σ_h z_h W_value[h],   b₁ = Σ_h z_h b_value[h],   W₂ = Σ_h z_h W_out[h]
        relu_relu:  the same, and between them Σ_h z_h W_middle[h] with the bias Σ_h z_h b_middle[h]
        relu_value: W₁ = all W_value[h],   b₁ = all b_value[h],   W₂ = all z_h W_out[h], side by side

    Args:
        codes: (B, H, queries, keys), as `capture_codes` and `attention_codes` give them, for the chosen pairs.

    Returns:
        Networks with leading axes (B, queries, keys). With `x` (B, keys, context_dim), `value_network(…)(x[:, None])`
        is each key's contribution; their sum over keys, divided as `layer.pooling` says, plus `layer.output_proj.bias`
        is the layer's output.

    Projections that carry adapters (LoRA), hooks or offloaded weights are called on a basis to find their matrices,
    without dropout. One that is no linear map plus a bias, such as a quantised one, is a ValueError.
    """
    if codes.dim() != 4 or codes.shape[1] != layer.num_heads:
        raise ValueError(
            f"codes must have shape (batch, {layer.num_heads} heads, queries, keys), got {tuple(codes.shape)}."
        )
    value_weight, value_bias = affine_map("value_proj", layer.value_proj, layer.value_dim)
    output_weight, _ = affine_map("output_proj", layer.output_proj, layer.v_dim)
    codes = codes.movedim(1, -1).to(value_weight.dtype)  # (B, queries, keys, H)
    value_weight = layer.shared_by_heads(value_weight.unflatten(0, (layer.num_kv_heads, -1)), 0)  # (H, Dv, value_dim)
    if value_bias is not None:
        value_bias = layer.shared_by_heads(value_bias.unflatten(0, (layer.num_kv_heads, -1)), 0)
    output_weight = output_weight.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)  # (H, dim, Dv)
    net = VALUE_NETS[layer.value_net]
    if net.on_values is not None:
        pairs = codes.shape[:-1]
        first = value_weight.flatten(0, 1).expand(*pairs, -1, -1)
        second = torch.einsum("...h,hod->...ohd", codes, output_weight).flatten(-2)
        bias = None if value_bias is None else value_bias.flatten().expand(*pairs, -1)
        return ValueNetwork((first, second), (bias, None), layer.value_net)
    if net.activation is None:
        weight = torch.tensordot(codes, output_weight @ value_weight, 1)
        bias = None if value_bias is None else codes @ (output_weight @ value_bias[..., None]).squeeze(-1)
        return ValueNetwork((weight,), (bias,), layer.value_net)
    weights = [torch.tensordot(codes, weight, 1) for weight in (value_weight, output_weight)]
    biases = [None if value_bias is None else codes @ value_bias, None]
    if layer.middle_weight is not None:
        weights.insert(1, torch.tensordot(codes, layer.middle_weight.to(codes.dtype), 1))
        biases.insert(1, None if layer.middle_bias is None else codes @ layer.middle_bias.to(codes.dtype))
    return ValueNetwork(tuple(weights), tuple(biases), layer.value_net)


def _affine(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    product = (weight @ x[..., None]).squeeze(-1)
    return product if bias is None else product + bias
