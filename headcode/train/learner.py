"""Everything that a training step changes: weights, optimiser state and averaged weights."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headcode.nn import capture_routing, make_model
from headcode.nn.experts import balance_loss
from headcode.nn.storage import WEIGHTS_FILE
from headcode.run import RunConfig
from headcode.tasks import Batch
from headcode.train.checkpoint import AVERAGE_FILE, OPTIMIZER_FILE
from headcode.train.distributed import Group, full_tensor, replicate, reshard_like, shard
from headcode.train.loss import Loss, LossContext, task_loss
from headcode.train.optim import Optimizer
from headcode.train.randomness import seed_of
from headcode.train.runtime import Runtime, check_memory, find_device


class Learner:
    """The model and optimiser of a run. `join` makes them ready to train; until then the weights may be replaced."""

    def __init__(self, config: RunConfig, runtime: Runtime, loss: Loss = task_loss) -> None:
        self.config, self.runtime, self.loss = config, runtime, loss
        self.device = find_device(runtime.device)
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        check_memory(config.model.num_parameters, self.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(config.seed, "weights"))
            self.model = make_model(config.model).to(self.device, self.dtype)

    def join(self, group: Group) -> None:
        """Replicate or shard the model over the group, compile it if asked for, and make the optimiser."""
        self.group = group
        many = group.world_size > 1
        self.sharded = self.runtime.fsdp and many
        if self.sharded:
            shard(self.model, list(self.model.blocks), self.device)
        self.model.train()
        self._forward: nn.Module = replicate(self.model, self.device) if many and not self.sharded else self.model
        self.optimizer = Optimizer(self.model, self.config.optimization, sharded=self.sharded)
        self.average: dict[str, Tensor] | None = None
        if self.config.ema_decay is not None:
            self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._called: Callable[..., Tensor] = torch.compile(self._forward) if self.runtime.compile else self._forward

    def backward(self, parts: list[Batch], step: int) -> Tensor:
        """Compute the gradients of the mean loss over this process's part of the batch; return that loss."""
        self.optimizer.zero_grad()
        seed = seed_of(self.config.seed, "step", step)
        total: Tensor | None = None
        for index, batch in enumerate(parts):
            x, y = self._on_device(batch.x), batch.y.to(self.device, non_blocking=True)
            predict = functools.partial(self._predict, self._called, x, dropout_seed=seed)
            context = LossContext(
                predict, self.model, Batch(x, y, batch.info), self.config.task, step, seed, self.config.auxiliary_weight
            )
            with self._synchronised(index == len(parts) - 1):
                with self._balanced() as balance:
                    loss = self.loss(context)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise ValueError(f"A loss must return a tensor with one number, got {loss!r}.")
                loss = loss / len(parts) if len(parts) > 1 else loss
                (loss if balance is None else loss + balance() / len(parts)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        if self.config.model.auxiliary_dims and any(
            parameter.grad is None for parameter in self.model.hint_projs.parameters()
        ):
            raise ValueError(
                "This loss leaves out the run's auxiliary targets: take predict(auxiliary=True) and add "
                "context.auxiliary_weight times auxiliary_loss, as task_loss does, or train with auxiliary_weight=0."
            )
        return total.reshape(())

    def gradient_norm(self) -> Tensor:
        """The norm of the gradient of all parameters, before clipping; clips it if the run has a clip_norm."""
        norm: Any = torch.nn.utils.get_total_norm(self.optimizer.gradients())
        norm = norm.full_tensor() if self.sharded else norm
        clip = self.config.optimization.clip_norm
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.optimizer.parameters, clip, norm)
        return norm

    def update(self, learning_rate: float, step: int, skip: Tensor | None = None) -> None:
        """One step of the optimiser and of the average; see `Optimizer.step` for `skip`."""
        self.optimizer.step(learning_rate, skip)
        if self.average is not None and self.config.ema_decay is not None:
            # A smaller decay at first: the average must soon forget the random weights that it began with.
            decay = min(self.config.ema_decay, (1 + step) / (10 + step))
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter.detach(), 1 - decay)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Inside the `with`, x -> outputs of the model in evaluation mode, with averaged weights if the run has any."""
        weights = None if self.average is None else {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.use_average()
        self.model.eval()
        try:
            yield lambda x: self._predict(self.model, self._on_device(x))
        finally:
            self.model.train()
            if self.sharded:
                self.model.reshard()  # a forward pass alone leaves the outer weights unsharded
            if weights is not None:
                self._set_weights(weights)

    def use_average(self) -> None:
        """Put the averaged weights, if the run keeps any, into the model."""
        if self.average is not None:
            self._set_weights(self.average)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint by file, unsharded and on the CPU; every process must take part."""
        files = {
            WEIGHTS_FILE: {name: full_tensor(tensor) for name, tensor in self.model.state_dict().items()},
            OPTIMIZER_FILE: {name: full_tensor(tensor) for name, tensor in self.optimizer.state()},
        }
        if self.average is not None:
            files[AVERAGE_FILE] = {name: full_tensor(tensor) for name, tensor in self.average.items()}
        return files

    def load(self, files: Mapping[str, dict[str, Tensor]]) -> None:
        """Load what `tensors` returned."""
        wanted = [WEIGHTS_FILE, OPTIMIZER_FILE, *([AVERAGE_FILE] if self.average is not None else [])]
        if missing := [name for name in wanted if name not in files]:
            raise ValueError(f"The checkpoint has no {missing[0]}, so that training cannot go on from it.")
        self._set_weights(self._resharded(files[WEIGHTS_FILE]))
        self.optimizer.load_state(files[OPTIMIZER_FILE])
        if self.average is not None:
            self.average = self._resharded(files[AVERAGE_FILE])

    def _resharded(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, parameter in self.model.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise ValueError(f"The checkpoint's weights are not those of the run's model: {name} differs.")
        return {name: reshard_like(weights[name], p) for name, p in self.model.named_parameters()}

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def _on_device(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype if x.is_floating_point() else x.dtype, non_blocking=True)

    def _predict(
        self,
        forward: Callable[..., Any],
        x: Tensor,
        dropout_seed: int | None = None,
        auxiliary: bool = False,
        hints: bool | None = None,
    ) -> Any:
        if hints is not None:
            warnings.warn("hints is called auxiliary now.", DeprecationWarning, stacklevel=2)
            auxiliary = hints
        bf16 = self.config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            options: dict[str, Any] = {"auxiliary": True} if auxiliary else {}
            prediction = forward(x, queries=self.config.task.model_queries, dropout_seed=dropout_seed, **options)
        if not bf16:
            return prediction
        if not auxiliary:
            return prediction.float()
        return prediction[0].float(), [part.float() for part in prediction[1]]

    @contextlib.contextmanager
    def _balanced(self) -> Iterator[Callable[[], Tensor] | None]:
        """A function that gives the weighted balance loss of all experts that were used inside the `with`, if any."""
        if self.config.model.num_experts == 1 or not self.config.balance_weight:
            yield None
            return
        with capture_routing(self.model) as routings:
            yield lambda: self.config.balance_weight * balance_loss(routings)

    @contextlib.contextmanager
    def _synchronised(self, is_last_part: bool) -> Iterator[None]:
        """Processes exchange gradients with the last part of a batch only."""
        if self.sharded:
            self.model.set_requires_gradient_sync(is_last_part)
            yield
        elif self.group.world_size > 1 and not is_last_part:
            with self._forward.no_sync():  # type: ignore[operator]
                yield
        else:
            yield
