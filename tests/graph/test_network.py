"""The network of graphs: its configuration, what it may not depend on, and its life as a run of any task."""

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="graph layers need headcode[graph]")

from headcode import capture_codes, load
from headcode.cli import main
from headcode.graph import GraphConfig, GraphNetwork
from headcode.nn import edit_codes, load_model, make_model, save_model
from headcode.presets import override, preset
from headcode.run import RunConfig
from headcode.tasks import Relations
from headcode.train import Runtime, Trainer
from tests.support.training import assert_same

SMALL = {"dim": 10, "num_layers": 3, "num_heads": 2, "qk_dim": 6, "v_dim": 8, "mlp_dim": 11}
TASK = Relations(max_steps=2, longer_steps=3, bystanders=2)
VARIANTS = [
    {},
    {"method": "softmax"},
    {"method": "softmax", "layer": "gatv2"},
    {"method": "softmax", "layer": "gatv2", "pooling": "max"},
    {"pooling": "sum+max", "feedforward": "swiglu"},
    {"method": "hyla_deeper", "share_layers": True},
    {"value_net": "swiglu", "pooling": "sum+mean+max", "edge_values": True},
    {"method": "softmax", "edge_values": True},
]


def network(**changes):
    torch.manual_seed(0)
    return GraphNetwork(GraphConfig(**TASK.model_sizes, **{**SMALL, **changes})).double()


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_order_of_the_nodes_does_not_matter(changes):
    model = network(**changes).eval()
    x = TASK.sample("train", 0, 5).x
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(model(x[:, order][:, :, order]), model(x)[:, order])
    torch.testing.assert_close(model(x, queries=slice(-1, None)), model(x)[:, -1:])
    torch.testing.assert_close(model(x)[2:3], model(x[2:3]))


@pytest.mark.parametrize("changes", VARIANTS)
def test_parameters_are_counted_and_files_bring_the_model_back(changes, tmp_path):
    model = network(**changes)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.config.forward_flops(6, slice(-1, None)) < model.config.forward_flops(6)
    found = load_model(save_model(model, tmp_path))
    assert found.config == model.config and isinstance(found, GraphNetwork)
    x = TASK.sample("iid", 0, 3).x
    torch.testing.assert_close(found(x), model.eval()(x), rtol=0, atol=0)


def test_only_what_leads_to_a_node_reaches_it():
    model = network(num_layers=2).eval()
    x = TASK.sample("longer", 0, 7).x  # three steps: in two layers the start is out of sight
    marked = x.clone()
    start = (x.diagonal(dim1=1, dim2=2) == 2).nonzero()
    marked[start[:, 0], start[:, 1], start[:, 1]] = 1
    torch.testing.assert_close(model(marked)[:, -1], model(x)[:, -1])
    assert not torch.allclose(network(num_layers=3).eval()(marked)[:, -1], network(num_layers=3).eval()(x)[:, -1])


@pytest.mark.parametrize("share_layers", [False, True])
def test_codes_are_laid_out_by_node_and_can_be_edited(share_layers):
    model = network(share_layers=share_layers).eval()
    x = TASK.sample("train", 0, 5).x
    with capture_codes(model) as codes:
        expected = model(x)
    assert sorted(codes) == [0, 1, 2] and codes[0].shape == (5, 2, 6, 6)
    assert ((codes[1] != 0).any(1) == (x != 0)).all()
    with edit_codes(model, lambda layer, codes: codes):
        torch.testing.assert_close(model(x), expected)
    with edit_codes(model, lambda layer, codes: codes * (layer != 2)):
        assert not torch.allclose(model(x), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": True}, "causal is not for models of graphs"),
        ({"position": "relative"}, "position is not for models of graphs"),
        ({"num_experts": 2}, "num_experts is not for models of graphs"),
        ({"pooling": "median"}, "pooling must be one of"),
        ({"layer": "gatv2"}, "use method='softmax' with it, got 'hyla'"),
        ({"layer": "gatv2", "method": "softmax", "pooling": "sum+max"}, "with one pooling"),
        ({"layer": "gatv2", "method": "softmax", "edge_values": True}, "use edge_values=False"),
    ],
)
def test_settings_that_a_model_of_graphs_does_not_have_are_one_sentence(changes, words):
    with pytest.raises(ValueError, match=words):
        GraphConfig(**TASK.model_sizes, **{**SMALL, **changes})


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 6, 5, dtype=torch.int64), r"got torch.int64 \(2, 6, 5\)"),
        (torch.zeros(2, 6, 6), r"got torch.float32 \(2, 6, 6\)"),
        (torch.full((1, 6, 6), 10), r"Relations must lie in 0..9, got 10..10"),
    ],
)
def test_wrong_graphs_are_one_sentence(x, words):
    with pytest.raises(ValueError, match=words):
        network()(x)


def test_a_task_and_a_model_of_another_kind_do_not_fit():
    logic, graph = preset("logic"), preset("graph")
    with pytest.raises(ValueError, match="needs a model of the kind graph_network, got transformer"):
        graph.replace(model=logic.model)
    with pytest.raises(ValueError, match="kind must be one of .*graph_network.*, got 'dodo'"):
        RunConfig.from_dict({**graph.to_dict(), "model": {**graph.model.to_dict(), "kind": "dodo"}})
    assert RunConfig.from_json(graph.to_json()) == graph and isinstance(make_model(graph.model), GraphNetwork)


RUN = {**SMALL, "max_steps": 2, "longer_steps": 3, "bystanders": 2, "steps": 12, "batch_size": 7, "log_every": 5}
RUN |= {"eval_every": 6, "eval_size": 23, "eval_batch_size": 11, "checkpoint_every": 4, "attention_dropout": 0.1}


@pytest.mark.parametrize("changes", [{}, {"method": "softmax", "layer": "gatv2", "attention_dropout": 0.0}])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, changes):
    config = override(preset("graph"), **{**RUN, **changes})
    runtime = Runtime(device="cpu", threads=1)
    Trainer(config, tmp_path / "whole", runtime=runtime).run()
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, tmp_path / "cut", runtime=runtime, reporters=[Stopping(9)]).run()
    result = Trainer(config, tmp_path / "cut", runtime=runtime).run()
    assert_same(tmp_path / "whole", tmp_path / "cut")
    found = {record["split"] for record in result.metrics if record["kind"] == "eval"}
    assert found == {"iid", "compositional", "longer"}
    assert isinstance(load(tmp_path / "cut"), GraphNetwork)


class Stopping:
    """A reporter that breaks the run off after a step, as a kill would."""

    def __init__(self, step):
        self.step = step

    def start(self, step, steps): ...
    def record(self, record): ...
    def close(self): ...

    def advance(self, step):
        if step == self.step:
            raise KeyboardInterrupt


def run_command(*arguments):
    """The exit code of a command, and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def flags(**more):
    values = {**RUN, **more}
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    Trainer(override(preset("graph"), **RUN), path, runtime=Runtime(device="cpu", threads=1)).run()
    return path


def test_train_eval_and_puzzle_work_as_on_other_tasks(tmp_path, trained):
    code, out, _ = run_command("train", "graph", *flags(), "--out", str(tmp_path / "run"))
    assert code == 0 and "hyla on graph" in out and "longer" in out
    code, out, _ = run_command("eval", str(trained), "--split", "longer", "--json")
    assert code == 0 and 0 <= json.loads(out)["accuracy_3_steps"] <= 1
    code, out, _ = run_command("puzzle", "graph", "--answer", "--bystanders", "1")
    assert code == 0 and "What is" in out and "closure says" in out


def test_decode_reads_the_code_of_the_last_step(tmp_path, trained):
    code, out, _ = run_command("decode", str(trained), "--size", "64", "--out", str(tmp_path), "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {row["source"] for row in rows} == {"codes", "residual", "untrained", "shuffled", "position"}
    assert {row["layer"] for row in rows} == {0, 1, 2}
    code, _, err = run_command("decode", str(trained), "--patch")
    assert code == 2 and "names no pairs of instances" in err
    code, out, _ = run_command("decode", str(trained), "--ablate", "--size", "32", "--out", str(tmp_path))
    assert code == 0 and "accuracy" in out


@pytest.mark.slow
def test_sweep_and_report_work_as_on_other_tasks(tmp_path, trained):
    sets = [f"--set={name}={value}" for name, value in {**RUN, "pooling": "sum,sum+max"}.items()]
    code, _, err = run_command("sweep", "graph", *sets, "--out", str(tmp_path / "many"))
    assert code == 0, err
    assert len((tmp_path / "many" / "results.csv").read_text().splitlines()) == 3
    code, _, err = run_command("report", str(trained), "--out", str(tmp_path / "report.html"))
    assert code == 0, err
    assert "best possible" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_explorer_shows_a_run(trained):
    pytest.importorskip("dash", reason="the explorer needs headcode[explorer]")
    from headcode.explorer.app import create_app

    _, explorer = create_app([str(trained)])
    address = "?model=first&shown=1&donor=n-1&query=5&key=4"
    left, right = str(explorer.left(address)), str(explorer.right(address, 0))
    assert "What is F to" in left and "closure says" in left
    assert "patched" in right and "Nearest codes" in right


def test_the_explorer_refuses_layers_without_codes(tmp_path):
    pytest.importorskip("dash", reason="the explorer needs headcode[explorer]")
    from headcode.explorer.app import create_app

    changes = {"steps": 1, "method": "softmax", "layer": "gatv2", "attention_dropout": 0.0}
    config = override(preset("graph"), **{**RUN, **changes})
    Trainer(config, tmp_path / "peer", runtime=Runtime(device="cpu", threads=1)).run()
    with pytest.raises(ValueError, match="has layers without codes"):
        create_app([str(tmp_path / "peer")])


WITHOUT = """
import sys
sys.modules["torch_geometric"] = None
from headcode.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_without_the_extra_a_sentence_names_it(tmp_path):
    command = ["train", "graph", "--steps", "1", "--out", str(tmp_path / "run")]
    ran = subprocess.run([sys.executable, "-c", WITHOUT, *command], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and 'pip install "headcode[graph]"' in ran.stderr and "Traceback" not in ran.stderr
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT, "puzzle", "graph"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0 and re.search(r"What is \w to \w", ran.stdout)


def test_learning_a_small_algebra():
    """Two generations commute, and two steps are soon learned; the exact solver has 1."""
    sizes = {"dim": 32, "num_layers": 2, "num_heads": 4, "qk_dim": 16, "v_dim": 16, "mlp_dim": 32, "edge_values": True}
    settings = {"generations": 2, "max_steps": 2, "longer_steps": 3, "bystanders": 1, "held_out": 0.0}
    config = override(
        preset("graph"), **sizes, **settings, steps=300, batch_size=64, learning_rate=0.01, eval_every=0, eval_size=256
    )
    result = Trainer(config, None, runtime=Runtime(device="cpu", threads=1)).run()
    accuracy = {record["split"]: record["accuracy"] for record in result.metrics if record["kind"] == "eval"}
    assert accuracy["iid"] > 0.95 and np.isfinite(accuracy["longer"])
