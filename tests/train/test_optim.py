"""The authors' optimiser, schedule and losses, step by step, against their own numbers."""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headcode.interop import load_reference, to_reference
from headcode.nn import ModelConfig, Transformer
from headcode.presets import OptimizationConfig, RunConfig
from headcode.tasks import Batch, Task
from headcode.train import Runtime, Trainer, learning_rate, task_loss
from headcode.train.muon import Muon, orthogonal
from headcode.train.optim import AdamW, Optimizer, is_block_matrix, is_decayed
from tests.support import GOLDENS

STEPS = dict(np.load(GOLDENS / "steps_a.npz"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(Task):
    """The 20 batches of the golden file as a task."""

    name: ClassVar[str] = "recorded"
    task_id: ClassVar[int] = 250
    version: ClassVar[int] = 1
    splits: ClassVar[tuple[str, ...]] = ("train",)

    which: str

    @property
    def objective(self):
        return "regression" if self.which == "logic" else "classification"

    @property
    def queries(self):
        return slice(-1, None) if self.which == "logic" else slice(-4, None)

    input_dim = property(lambda self: {"logic": 5, "raven": 8}[self.which])
    output_dim = property(lambda self: {"logic": 1, "raven": 8}[self.which])
    sequence_length = property(lambda self: {"logic": 16, "raven": 36}[self.which])

    def sample(self, split, index, batch_size):
        assert (split, batch_size) == ("train", 8)
        index = min(index, 19)  # batches are drawn ahead of need
        x, y = (torch.from_numpy(STEPS[f"{self.which}:{name}:{index}"]) for name in "xy")
        return Batch(x, y, {})


def tree(which, kind):
    prefix = f"{which}:{kind}:"
    return {name.removeprefix(prefix): array for name, array in STEPS.items() if name.startswith(prefix)}


AUTHORS = OptimizationConfig(learning_rate=1e-3, warmup_steps=10, weight_decay=0.1, authors_schedule=True)


class FileEnds(Exception):
    pass


TOLERANCES = {"logic": (1e-6, 1e-7), "raven": (3e-4, 1e-4)}  # of the losses, and of the weights as a whole


@pytest.mark.parametrize("which", TOLERANCES)
@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=pytest.mark.slow)])
def test_twenty_steps_of_the_authors(which, backend):
    loss_tolerance, weight_tolerance = TOLERANCES[which]
    start = load_reference({p: a.astype(np.float64) for p, a in tree(which, "initial").items()}, method="hyla")
    config = RunConfig(
        task=Recorded(which=which),
        model=start.config.replace(backend=backend),
        optimization=AUTHORS,
        steps=200,
        batch_size=8,
        log_every=1,
        eval_size=0,
        precision="float64",
    )
    seen = []

    def kept_loss(context):
        if context.step == 20:
            raise FileEnds
        loss = task_loss(context)
        seen.append(loss.item())
        return loss

    trainer = Trainer(config, loss=kept_loss, runtime=Runtime(threads=1))
    trainer.model.load_state_dict(start.state_dict())
    with pytest.raises(FileEnds):
        trainer.run()
    np.testing.assert_allclose(seen, STEPS[f"{which}:losses"], rtol=0, atol=loss_tolerance)
    expected = tree(which, "final")
    found = to_reference(trainer.model)
    assert found.keys() == expected.keys()
    difference = np.sqrt(sum(np.square(found[path] - expected[path]).sum() for path in expected))
    norm = np.sqrt(sum(np.square(array).sum() for array in expected.values()))
    assert difference / norm <= weight_tolerance
    # The steps were not nothing: far more changed than the tolerance.
    moved = np.sqrt(sum(np.square(expected[path] - tree(which, "initial")[path]).sum() for path in expected))
    assert moved / norm > 1e-2


@pytest.mark.parametrize("which", ["logic", "raven"])
def test_all_learning_rates_of_the_authors(which):
    rates = [learning_rate(AUTHORS, step, 200) for step in range(200)]
    np.testing.assert_allclose(rates, STEPS[f"{which}:lr"], rtol=0, atol=1e-9)


def test_our_cosine_ends_at_the_last_step_and_theirs_a_warm_up_early():
    ours = AUTHORS.replace(authors_schedule=False)
    assert learning_rate(AUTHORS, 190, 200) == pytest.approx(1e-4)
    assert learning_rate(ours, 190, 200) == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + np.cos(np.pi * 180 / 190)))
    assert learning_rate(ours, 200, 200) == pytest.approx(1e-4)


def test_warm_up_is_at_most_a_tenth_of_the_steps():
    config = OptimizationConfig(learning_rate=2.0, warmup_steps=1000)
    assert [learning_rate(config, step, 50) for step in (0, 1, 4, 5)] == [0.0, 0.4, 1.6, 2.0]
    assert learning_rate(config, 0, 5) == 2.0  # no tenth of five steps


@given(steps=st.integers(1, 500), warmup=st.integers(0, 100), final=st.floats(0, 1), authors=st.booleans())
def test_the_rate_rises_then_falls_and_stays_between_floor_and_peak(steps, warmup, final, authors):
    config = OptimizationConfig(learning_rate=1.0, warmup_steps=warmup, final_rate=final, authors_schedule=authors)
    rates = [learning_rate(config, step, steps) for step in range(steps + 1)]
    peak = min(warmup, steps // 10)
    assert rates[peak] == pytest.approx(1.0)
    assert all(before < after for before, after in itertools.pairwise(rates[: peak + 1]))
    assert all(before >= after - 1e-12 for before, after in itertools.pairwise(rates[peak:]))
    assert rates[-1] == pytest.approx(final if steps > peak else 1.0)


def test_what_is_decayed():
    model = Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=7, dim=8, num_heads=2, qk_dim=4, v_dim=4))
    spared = {name for name, parameter in model.named_parameters() if not is_decayed(name, parameter)}
    block = {
        "attention_norm.weight",
        "attention_norm.bias",
        "attention.output_proj.bias",
        "feedforward_norm.weight",
        "feedforward_norm.bias",
        "feedforward.hidden_proj.bias",
        "feedforward.output_proj.bias",
    }
    outside = {"embedding.bias", "final_norm.weight", "final_norm.bias", "output_proj.bias"}
    assert spared == outside | {f"blocks.{i}.{name}" for i in (0, 1) for name in block}


def test_one_update_by_hand():
    """p ← p (1 - rate·decay) - rate · sign(g) at the first step, whatever the size of the gradient."""
    model = torch.nn.Linear(3, 2).double()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = Optimizer(model, OptimizationConfig(weight_decay=0.5))
    model.weight.grad = torch.full_like(weight, 7.0)
    model.bias.grad = torch.full_like(bias, -3.0)
    optimizer.step(0.1)
    torch.testing.assert_close(model.weight.detach(), weight * 0.95 - 0.1, atol=1e-8, rtol=0)
    torch.testing.assert_close(model.bias.detach(), bias + 0.1, atol=1e-8, rtol=0)


def test_a_skipped_update_changes_nothing():
    model = torch.nn.Linear(3, 2)
    optimizer = Optimizer(model, OptimizationConfig())
    assert optimizer.skips_on_device
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1, skip=torch.zeros(()))
    before = {name: tensor.clone() for name, tensor in optimizer.state()}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    model.weight.grad[0, 0] = float("nan")
    optimizer.step(0.1, skip=torch.ones(()))
    assert all(torch.equal(a, b.detach()) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.state())


def test_state_from_the_cpu_goes_to_where_the_parameters_are():
    """Checkpoints are read on the CPU. The meta device stands for a GPU; the count of steps stays, unless fused."""
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = Optimizer(model, OptimizationConfig(), sharded=True)
    shapes = {"weight": (2, 3), "bias": (2,)}
    moments = {f"{name}.{key}": torch.ones(shapes[name]) for name in shapes for key in ("exp_avg", "exp_avg_sq")}
    optimizer.load_state(moments | {f"{name}.step": torch.tensor(3.0) for name in shapes})
    assert {name: tensor.device.type for name, tensor in optimizer.state()} == {
        **dict.fromkeys(moments, "meta"),
        "weight.step": "cpu",
        "bias.step": "cpu",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_has_the_bits_of_torch(dtype):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((7, 5), (11,), (3, 2), (2,))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]

    def groups(parameters):
        decays = ((parameters[:2], 0.3), (parameters[2:], 0.0))
        return [{"params": part, "weight_decay": decay, "lr": 0.1} for part, decay in decays]

    mine = AdamW(groups(ours), (0.9, 0.99), 1e-8)
    other = torch.optim.AdamW(groups(theirs), betas=(0.9, 0.99), eps=1e-8, fused=True)
    for skip in (0, 0, 1, 0):
        mine.found_inf = other.found_inf = torch.tensor(float(skip))
        other.grad_scale = None
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):  # the last one never gets a gradient
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert mine.state.get(a, {}).keys() == other.state.get(b, {}).keys()
        assert all(torch.equal(mine.state[a][key], other.state[b][key]) for key in mine.state.get(a, {}))
    assert ours[-1] not in mine.state and mine.state[ours[0]]["step"] == 3


def test_muon_takes_the_matrices_inside_the_blocks():
    config = ModelConfig(input_dim=5, output_dim=1, max_length=7, dim=8, num_heads=2, qk_dim=4, v_dim=4, num_layers=1)
    model = Transformer(config)
    names = {name for name, parameter in model.named_parameters() if is_block_matrix(name, parameter)}
    attention = {f"blocks.0.attention.{part}_proj.weight" for part in ("query", "key", "value", "output")}
    assert names == attention | {"blocks.0.feedforward.hidden_proj.weight", "blocks.0.feedforward.output_proj.weight"}
    optimizer = Optimizer(model, OptimizationConfig(optimizer="muon", weight_decay=0.0))
    torch.manual_seed(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0.1)
    kept = dict(optimizer.state())
    assert {name.rpartition(".")[0] for name in kept if name.endswith("momentum_buffer")} == names
    for name in names:
        # An orthogonalised update: singular values near one another, where those of the gradient were not.
        update = torch.linalg.svdvals(model.get_parameter(name).detach() - before[name])
        assert update.max() / update.min() < 3


def test_muon_is_torch_muon_in_full_precision():
    torch.manual_seed(0)
    shapes = [(7, 5), (5, 7), (7, 5), (3, 3)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizers = [
        Muon(ours, lr=0.1, weight_decay=0.3),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        # torch rounds the iteration to bfloat16, which has eight bits.
        assert (mine - other).norm() / other.norm() < 2**-8


def test_muon_update_keeps_the_singular_vectors():
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(2, 5, 11, dtype=torch.float64), full_matrices=False)
    update = orthogonal(left * values[:, None] @ right)
    rotated = left.mT @ update @ right.mT
    torch.testing.assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=1, dim2=2)), atol=1e-12, rtol=0)
    assert ((rotated.diagonal(dim1=1, dim2=2) - 1).abs() < 0.35).all()
    torch.testing.assert_close(orthogonal(update.mT), orthogonal(update).mT)


def test_muon_leaves_a_parameter_without_gradient_alone():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    Muon([parameter], lr=0.1, weight_decay=0.3).step()
    assert parameter.detach().equal(torch.ones(2, 3))


def test_state_goes_out_and_in():
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Optimizer(model, OptimizationConfig()) for model in models]
    gradients = [[torch.randn_like(p) for p in models[0].parameters()] for _ in range(4)]

    def step(which, number):
        for parameter, gradient in zip(models[which].parameters(), gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizers[which].step(0.1)

    for number in range(2):
        step(0, number)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state({name: tensor.clone() for name, tensor in optimizers[0].state()})
    for number in range(2, 4):
        step(0, number)
        step(1, number)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    with pytest.raises(ValueError, match="does not belong to this model"):
        optimizers[1].load_state({"other.exp_avg": torch.zeros(2)})
