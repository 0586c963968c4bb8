"""The loop: exact to resume, independent of how a batch is divided, and stopped by what is not finite."""

import json
import math
import signal
from collections import deque
from contextlib import nullcontext

import pytest
import torch

import headcode
from headcode import capture_codes
from headcode.tasks import add_sums
from headcode.train import (
    Runtime,
    Trainer,
    TrainingFailed,
    TrainingInterrupted,
    prediction_loss,
    read_metrics,
    task_loss,
)
from headcode.train.distributed import Group
from headcode.train.runtime import numerics
from tests.support.bf16 import needs_bf16
from tests.support.training import Interrupting, assert_same, small_config, train


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_a_function_of_its_configuration(config):
    first, second, other = train(config), train(config), train(small_config(seed=1))
    assert first.step == 30
    assert first.metrics == second.metrics != other.metrics
    assert_equal_weights(weights(first.model), weights(second.model))
    assert not first.model.training


@pytest.mark.parametrize("extras", [{}, {"ema_decay": 0.9, "clip_norm": 0.5, "accumulate": 2}])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_and_resumed_is_the_same_run(tmp_path, extras, number):
    config = small_config(**extras)
    train(config, tmp_path / "whole")
    for step in (4, 12, 20):
        with pytest.raises(
            TrainingInterrupted, match=rf"stopped at step {step + 1} and saved.*headcode resume"
        ) as stop:
            train(config, tmp_path / "broken", reporters=[Interrupting(step, number)])
        assert (stop.value.signal_number, stop.value.step) == (number, step + 1)
        assert (tmp_path / "broken" / "checkpoints" / f"step-{step + 1}").is_dir()
    train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_a_signal_in_the_last_step_still_ends_a_whole_run(tmp_path, config):
    assert train(config, tmp_path / "run", reporters=[Interrupting(30)]).step == 30


def test_a_second_sigterm_does_not_keep_it_from_saving(tmp_path, config):
    """Slurm and torchrun send it to the same process, one after the other."""
    both = [Interrupting(12), Interrupting(13)]
    with pytest.raises(TrainingInterrupted, match="stopped at step 13 and saved"):
        train(config, tmp_path / "run", reporters=both)
    assert (tmp_path / "run" / "checkpoints" / "step-13").is_dir()


def test_a_second_ctrl_c_ends_at_once(tmp_path, config):
    # A shell starts what it runs in the background with Ctrl-C ignored; this test may be there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    reporters = [Interrupting(12, signal.SIGINT), Interrupting(13, signal.SIGINT)]
    try:
        with pytest.raises(KeyboardInterrupt) as stop:
            train(config, tmp_path / "run", reporters=reporters)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not isinstance(stop.value, TrainingInterrupted)


class Pair(Group):
    """This process as one of two; the other one has the same loss and no signal."""

    def __init__(self, rank):
        super().__init__(rank, 2)

    def mean(self, values):
        return torch.stack([values[0], values[1] / 2])

    def largest(self, value):
        return value


@pytest.mark.parametrize("delay", [0, 3])
def test_one_of_two_processes_gets_a_signal(delay):
    """It is the signal that both report, and with GPUs both heed it the same number of steps later."""
    trainer = Trainer(small_config(), runtime=Runtime(threads=1))
    trainer._group, trainer._signal_delay, trainer._signals = Pair(0), delay, deque()
    loss = torch.tensor(0.5)
    found = [trainer._agree(loss, signal.SIGTERM if step >= 2 else None) for step in range(6)]
    assert [stop for _, stop in found] == [0] * (2 + delay) + [signal.SIGTERM] * (4 - delay)
    assert all(mean == loss for mean, _ in found)


def test_only_the_main_process_reports(monkeypatch, config):
    told = []

    class Telling:
        start = record = advance = close = lambda *anything: told.append(anything)

    monkeypatch.setattr("headcode.train.loop.join_group", lambda device: Group(rank=1, world_size=1))
    assert train(config, reporters=[Telling()]).step == 30
    assert told == []


def test_metrics_after_the_checkpoint_are_written_again(tmp_path, config):
    train(config, tmp_path / "whole")
    train(config, tmp_path / "broken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 31, "los')
    (tmp_path / "broken" / "checkpoints" / "step-30" / "model.safetensors").write_bytes(b"gone")
    with pytest.warns(UserWarning, match=r"step-30/model\.safetensors does not have the content"):
        train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_a_finished_run_stays_as_it_is(tmp_path, config):
    first = train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns
    again = train(config, tmp_path / "run")
    assert again.step == 30 and again.metrics == first.metrics
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns == before


def test_the_records(tmp_path, config):
    result = train(config, tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    assert records == result.metrics
    assert [r["step"] for r in records if r["kind"] == "train"] == [7, 14, 21, 28, 30]
    evaluations = [(r["step"], r["split"]) for r in records if r["kind"] == "eval"]
    assert evaluations == [(step, split) for step in (10, 20, 30) for split in ("iid", "compositional", "novel")]
    assert all("seconds" not in r for r in records)
    timing = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert [t["step"] for t in timing] == [7, 14, 21, 28, 30]
    assert all(t["steps_per_second"] > 0 and 0 <= t["data_wait"] <= 1 for t in timing)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["seed"] == 0
    assert environment["starts"][0]["threads"] == 1 and environment["starts"][0]["torch"] == torch.__version__


def test_evaluation_reads_the_stated_instances(config):
    """The recorded numbers, again by hand: 23 instances of each stream, whatever the batch size."""
    result = train(config)
    for split in ("iid", "compositional", "novel"):
        batch = config.task.instances(split, range(23))
        with torch.no_grad():
            prediction = result.model(batch.x)[:, -1:]
        expected = config.task.metrics(add_sums({}, config.task.score(prediction, batch)))
        record = next(r for r in result.metrics if r["kind"] == "eval" and r["step"] == 30 and r["split"] == split)
        assert record["loss"] == pytest.approx(prediction_loss(config.task, prediction, batch.y).item(), rel=1e-5)
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-4)


def test_no_evaluation_but_the_last_and_none_at_all():
    last = train(small_config(eval_every=0)).metrics
    assert {r["step"] for r in last if r["kind"] == "eval"} == {30}
    assert not [r for r in train(small_config(eval_size=0)).metrics if r["kind"] == "eval"]


def test_parts_of_a_batch_add_up_to_the_batch():
    whole = train(small_config(precision="float64", log_every=1)).metrics
    parts = train(small_config(precision="float64", log_every=1, accumulate=3)).metrics
    for one, other in zip(whole, parts, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_the_stream_of_instances(config):
    """Step i trains on instances i·B … i·B+B-1 of `train`, in parts or not."""
    for accumulate in (1, 2):
        seen = []

        def loss(context, seen=seen):
            seen.append(context.batch.info["instance"].tolist())
            return task_loss(context)

        train(small_config(accumulate=accumulate, steps=5), loss=loss)
        assert [number for part in seen for number in part] == list(range(5 * 6))


def test_dropout_depends_on_seed_and_step_alone():
    """The same step twice gives the same loss; another step, on the same batch, another one."""
    trainer = Trainer(small_config(attention_dropout=0.5), runtime=Runtime(threads=1))
    trainer.learner.join(trainer._group)
    batch = trainer.task.sample("train", 0, 6)
    losses = [trainer.learner.backward([batch], step).item() for step in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_the_average_is_evaluated_and_kept(tmp_path):
    config = small_config(ema_decay=0.9, steps=3, eval_every=0)
    path = []

    class Watching:
        def start(self, step, steps):
            path.append(weights(trainer.model))

        def record(self, record): ...
        def close(self): ...

        def advance(self, step):
            path.append(weights(trainer.model))

    trainer = Trainer(config, tmp_path / "run", runtime=Runtime(threads=1), reporters=[Watching()])
    result = trainer.run()
    average = path[0]
    for step, current in enumerate(path[1:]):
        decay = min(0.9, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * current[name] for name in average}
    for name, tensor in result.model.state_dict().items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-6)
    loaded = headcode.load(tmp_path / "run")
    assert_equal_weights(weights(loaded), weights(result.model))


def test_clipping_limits_the_gradient():
    norms = {}
    for clip in (None, 1e-3):
        trainer = Trainer(small_config(clip_norm=clip), runtime=Runtime(threads=1))
        trainer.learner.join(trainer._group)
        trainer.learner.backward([trainer.task.sample("train", 0, 6)], 0)
        reported = trainer.learner.gradient_norm().item()
        actual = math.sqrt(sum(g.square().sum().item() for g in trainer.learner.optimizer.gradients()))
        norms[clip] = (reported, actual)
    assert norms[None][0] == pytest.approx(norms[None][1]) == pytest.approx(norms[1e-3][0])
    assert norms[1e-3][1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("looks_each_step", [True, False])
def test_what_is_not_finite_stops_before_the_update(tmp_path, what, looks_each_step, monkeypatch):
    """Bad at step 15: the run ends there (or, without looks at each step, at the next record), and nothing moved."""

    def loss(context):
        value = task_loss(context)
        if context.step < 15:
            return value
        # An infinite slope at a finite value, or an infinite value.
        return value + (value - value.detach()).clamp(min=0).sqrt() if what == "gradient" else value + math.inf

    trainer = Trainer(small_config(), tmp_path / "run", loss=loss, runtime=Runtime(threads=1))
    if not looks_each_step:
        set_up = trainer._set_up

        def without_looks(stack):
            set_up(stack)
            trainer._looks_each_step = False

        monkeypatch.setattr(trainer, "_set_up", without_looks)
    before = {}

    class Keeping:
        def start(self, step, steps): ...
        def record(self, record): ...
        def close(self): ...

        def advance(self, step):
            if step == 15:
                before.update(weights(trainer.model))

    trainer._reporters.append(Keeping())
    expected = "loss is inf" if what == "loss" else "gradient norm is (nan|inf)"
    with pytest.raises(TrainingFailed, match=rf"{expected} at step 15: .*last good checkpoint is .*step-12"):
        trainer.run()
    assert_equal_weights(before, weights(trainer.model))
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-10", "step-12"]


def test_a_loss_on_codes_trains_the_codes():
    """The example of the documentation: codes of one composition are pulled together."""

    def spread(context, codes):
        mean_code = codes[0].mean((2, 3))  # (B, H)
        same = context.batch.info["composition"][:, None] == context.batch.info["composition"]
        return torch.cdist(mean_code, mean_code).square()[same].mean()

    distances = {}
    for weight in (0.0, 10.0):
        seen = []

        def loss(context, weight=weight, seen=seen):
            with capture_codes(context.model, layers=[0], detach=False) as codes:
                value = task_loss(context)
            distance = spread(context, codes)
            seen.append(distance.item())
            return value + weight * distance

        train(small_config(batch_size=64, attention_dropout=0.0, learning_rate=1e-2, eval_size=0), loss=loss)
        distances[weight] = seen[-1]
    assert distances[10.0] < 0.5 * distances[0.0]


def test_a_loss_that_is_no_number_is_refused(config):
    with pytest.raises(ValueError, match="must return a tensor with one number"):
        train(config, loss=lambda context: context.predict())


def test_random_numbers_in_a_loss_are_resumed(tmp_path, config):
    def loss(context):
        return task_loss(context) * (1 + 0.1 * torch.rand(()))

    train(config, tmp_path / "whole", loss=loss)
    with pytest.raises(TrainingInterrupted):
        train(config, tmp_path / "broken", loss=loss, reporters=[Interrupting(11)])
    torch.rand(17)
    train(config, tmp_path / "broken", loss=loss)
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_training_leaves_the_process_as_it_was(config):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    train(config)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads and signal.getsignal(signal.SIGTERM) is handler


def test_it_learns():
    """Not a function of luck: the loss falls far below that of the best constant."""
    easy = {"num_variables": 1, "num_terms": 1, "held_out": 0.0, "novel": 0.0, "attention_dropout": 0.0}
    config = small_config(steps=300, batch_size=64, learning_rate=1e-2, eval_every=0, eval_size=512, **easy)
    result = train(config)
    found = next(r for r in result.metrics if r["kind"] == "eval" and r["split"] == "iid")
    assert found["pooled_r2"] > 0.6


@pytest.mark.parametrize(
    ("precision", "records", "tolerance"),
    [pytest.param("bf16", 1, 1e-2, marks=needs_bf16), ("float64", None, 1e-3)],
)
def test_other_precisions(precision, records, tolerance):
    """float64 stays on float32's path; bf16 starts on it and then, rounding every product, takes its own."""
    exact = [r["loss"] for r in train(small_config(eval_size=0)).metrics]
    other = [r["loss"] for r in train(small_config(eval_size=0, precision=precision)).metrics]
    assert other != exact and all(loss < 1 for loss in other)
    assert other[:records] == pytest.approx(exact[:records], rel=tolerance)


def test_tf32_needs_a_gpu_and_says_so():
    with pytest.raises(ValueError, match="'tf32' is for CUDA devices, this run is on cpu"):
        train(small_config(precision="tf32"))


def test_the_gpu_of_a_run_is_the_current_one(monkeypatch):
    """Collectives and kernels go to the current GPU: without this, those of all processes would go to the first."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or nullcontext())
    with numerics("float32", torch.device("cuda", 1), None):
        assert chosen == [torch.device("cuda", 1)]


def test_muon_trains_and_resumes(tmp_path):
    config = small_config(optimizer="muon")
    train(config, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        train(config, tmp_path / "broken", reporters=[Interrupting(13)])
    train(config, tmp_path / "broken")
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_a_probe_measures_and_leaves_the_weights(config):
    trainer = Trainer(config, runtime=Runtime(threads=1))
    before = weights(trainer.model)
    assert trainer.probe(0.05) > 1
    assert_equal_weights(before, weights(trainer.model))
