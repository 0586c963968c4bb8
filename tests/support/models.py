"""Small models, and what a pass of them gives."""

import contextlib

import torch

from headcode.nn import ModelConfig, Transformer

DECODER = {
    "vocab_size": 23,
    "dim": 10,
    "num_heads": 2,
    "qk_dim": 8,
    "v_dim": 6,
    "mlp_dim": 11,
    "feedforward": "swiglu",
    "causal": True,
    "backend": "reference",
}


def make(**changes):
    settings = {"input_dim": 5, "output_dim": 3, "max_length": 13, "dim": 48, "num_heads": 4, "qk_dim": 32, "v_dim": 16}
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**(settings | {"mlp_dim": 80} | changes))).train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def run(model, x, queries=None, seed=7):
    """The output, and gradients of everything, of a loss that reads the output unevenly."""
    x = x.clone().requires_grad_()
    out = model(x, queries=queries, dropout_seed=seed)
    weights = torch.linspace(0, 2, out.numel(), dtype=torch.float64).cos().view(out.shape).to(out.dtype)
    inputs = {"x": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad((out * weights).sum(), list(inputs.values()))
    return out.detach(), dict(zip(inputs, gradients, strict=True))


def check_same_gradients(actual, wanted, parameters):
    """Two tensors with the same values, and through their sines the same gradients of all parameters."""
    torch.testing.assert_close(actual, wanted)
    expected = torch.autograd.grad(wanted.sin().sum(), parameters)
    for found, gradient in zip(torch.autograd.grad(actual.sin().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(found, gradient)


def distance(given, expected):
    return float((given.double() - expected).norm() / expected.norm())


def exact(model):
    """The same weights in float64, on the readable backend."""
    other = Transformer(model.config.replace(backend="reference")).double()
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


@contextlib.contextmanager
def one_thread():
    """Torch with one thread, and afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
