"""Captured codes are the model's codes, with the right labels, for any pairs, on every method and backend."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from headcode import METHODS, capture_codes
from headcode.analysis import capture, choose_pairs, codes_of, open_run
from headcode.analysis.runs import check_layers
from headcode.analysis.runs import open_run as open_again
from headcode.tasks import SRaven


def direct(run, split, size):
    batch = run.task.instances(split, np.arange(size))
    with capture_codes(run.model) as codes, torch.no_grad():
        output = run.model(batch.x)
    return batch, codes, output[:, run.task.queries]


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
def test_codes_and_labels_of_a_split(make_run, tmp_path, ending):
    run = open_run(make_run("sraven"))
    batch, codes, output = direct(run, "compositional", 11)
    # 17 is the last token: the last layer is asked for a query (5) that it does not compute by itself.
    read = capture(
        run,
        "compositional",
        tmp_path / f"c{ending}",
        size=11,
        batch_size=4,
        queries=[5, -1],
        keys=[3, 17],
        residual=True,
    )
    np.testing.assert_array_equal(read["pairs"], [[5, 3], [5, 17], [17, 3], [17, 17]])
    for layer in (0, 1):
        expected = codes[layer][:, :, [5, 5, 17, 17], [3, 17, 3, 17]].transpose(1, 2)
        np.testing.assert_allclose(read[f"codes_layer_{layer}"], expected, atol=1e-6)
        side_by_side = codes[layer][:, :, 17, [3, 17]].permute(0, 2, 1).flatten(1)
        np.testing.assert_allclose(codes_of(read, layer, 17), side_by_side, atol=1e-6)
        assert read[f"residual_layer_{layer}"].shape == (11, 2, 12)
    for name in ("token_rules", "rules", "composition", "instance", "permutations"):
        np.testing.assert_array_equal(read[name], batch.info[name])
    np.testing.assert_array_equal(read["targets"], batch.y)
    np.testing.assert_array_equal(read["predictions"], output.argmax(-1))
    np.testing.assert_array_equal(read["correct"], (output.argmax(-1) == batch.y).all(1))
    assert read.card["split"] == "compositional" and read.card["step"] == 3 and read.card["method"] == "hyla"


def test_residual_stream_is_the_block_output(make_run, tmp_path):
    run = open_run(make_run("logic"))
    hidden = []
    handles = [b.register_forward_hook(lambda m, a, out: hidden.append(out.detach())) for b in run.model.blocks]
    batch, _, output = direct(run, "novel", 5)
    for handle in handles:
        handle.remove()
    read = capture(run, "novel", tmp_path / "c.npz", size=5, residual=True)
    for layer in (0, 1):
        np.testing.assert_allclose(read[f"residual_layer_{layer}"][:, 0], hidden[layer][:, -1], atol=1e-6)
    variance = batch.info["targets"].double().var(dim=1, correction=0)
    score = 1 - (output[:, 0, 0].double() - batch.y[:, 0].double()).square() / variance
    np.testing.assert_allclose(read["r2"], score, rtol=1e-4)
    np.testing.assert_array_equal(read["correct"], score >= 0.95)
    np.testing.assert_array_equal(read["term_ids"], batch.info["term_ids"])


@pytest.mark.parametrize("backend", ["reference", "chunked", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_backend(make_run, tmp_path, method, backend):
    run = open_run(make_run("logic"), "untrained")
    reference = type(run.model)(run.config.model.replace(method=method, backend="reference")).eval()
    reference.load_state_dict({**reference.state_dict(), **run.model.state_dict()})  # `hyla_deeper` has more
    model = type(run.model)(run.config.model.replace(method=method, backend=backend)).eval()
    model.load_state_dict(reference.state_dict())
    other = type(run)(run.path, run.config, model, 0)
    _, codes, _ = direct(type(run)(run.path, run.config, reference, 0), "iid", 5)
    read = capture(other, "iid", tmp_path / "c.npz", size=5, keys="all")
    for layer in (0, 1):
        np.testing.assert_allclose(read[f"codes_layer_{layer}"], codes[layer][:, :, -1].transpose(1, 2), atol=2e-5)


def test_untrained_is_where_the_run_started(make_run):
    from headcode.train.learner import Learner
    from headcode.train.runtime import Runtime

    path = make_run("sraven")
    start = open_run(path, "untrained")
    expected = Learner(start.config, Runtime(device="cpu")).model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in start.model.state_dict().items())
    trained = open_run(path).model.state_dict()
    assert not torch.equal(
        trained["blocks.0.attention.query_proj.weight"], expected["blocks.0.attention.query_proj.weight"]
    )


def test_choice_of_pairs():
    task = SRaven(num_features=2)
    assert choose_pairs(task, None, "self").tolist() == [[16, 16], [17, 17]]
    assert choose_pairs(task, [-1], "all").tolist() == [[17, k] for k in range(18)]
    with pytest.raises(ValueError, match="18 tokens, 0 to 17; there is no query 18"):
        choose_pairs(task, [18], "self")
    with pytest.raises(ValueError, match="there is no key -19"):
        choose_pairs(task, [0], [-19])
    with pytest.raises(ValueError, match="self, all or positions"):
        choose_pairs(task, [0], "each")
    assert check_layers([-1, 0, 1], 2) == [0, 1]


def test_mistakes_are_sentences(make_run, tmp_path):
    run = open_run(make_run("sraven"))
    with pytest.raises(ValueError, match="no split 'novel'; it has: train, iid, compositional"):
        capture(run, "novel", tmp_path / "c.npz")
    with pytest.raises(ValueError, match="layers 0 to 1"):
        capture(run, "iid", tmp_path / "c.npz", layers=[2])
    with pytest.raises(ValueError, match="is for fuzzy logic"):
        open_again(make_run("sraven"), inputs="fixed_query")
    read = capture(run, "iid", tmp_path / "c.npz", size=3, layers=[1])
    with pytest.raises(ValueError, match="codes of layers 1; there is no layer 0"):
        codes_of(read, 0, 17)
    with pytest.raises(ValueError, match=r"queries \[16, 17\]; there is no query 3"):
        codes_of(read, 1, 3)


MEMORY = """
import resource, sys
from headcode.analysis import capture, open_run
from pathlib import Path
out = Path(sys.argv[1]) / "big.npz"
codes = capture(open_run(sys.argv[2], "untrained"), "train", out, size=50_000, keys="all", residual=True)
print(codes["codes_layer_3"].shape, out.stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_fifty_thousand_puzzles_in_less_than_two_gigabytes(tmp_path):
    from headcode.presets import preset

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(preset("sraven").to_json())
    found = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path), str(folder)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    shape, size, peak = found.stdout.rsplit(maxsplit=2)
    assert shape == "(50000, 144, 16)"
    assert int(size) > 1.8e9, "more on disk than may be in memory"
    assert int(peak) * 1024 < 2e9, f"{int(peak) / 1e6:.2f} GB"
