"""The codes that the paper's authors take: which instances, which tokens, and the very numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headcode.analysis import OpenRun, as_authors, capture, decode
from headcode.analysis.runs import untrained_model
from headcode.cli import main
from headcode.nn import capture_codes
from headcode.presets import override, preset
from headcode.train import Trainer
from tests.support.commands import exit_code

TINY = {"dim": 8, "num_layers": 2, "num_heads": 2, "qk_dim": 6, "v_dim": 4, "mlp_dim": 8, "backend": "reference"}


def opened(config):
    return OpenRun(Path("somewhere"), config, untrained_model(config), 0)


def sraven_run(**changes):
    return opened(override(preset("sraven"), num_features=3, num_values=5, aligned=0.25, **TINY, **changes))


def test_sraven_without_permutations_from_the_last_slot_to_its_own_feature():
    """Three features, nine panels: token 26 is asked for; tokens 20 and 23 are its feature in the last row."""
    run, pairs = as_authors(sraven_run())
    assert pairs == {"queries": [26], "keys": [20, 23]}
    assert not run.task.permute and run.config.task == run.task
    batch = run.task.sample("compositional", 0, 7)
    row = batch.info["puzzles"][:, 2, :, 2].long()  # last row, last position: one feature in all columns
    assert torch.equal(batch.x[:, 20].argmax(-1), row[:, 0]) and torch.equal(batch.x[:, 23].argmax(-1), row[:, 1])
    assert (batch.info["permutations"] == torch.arange(3)).all()


def test_the_numbers_are_those_of_the_model(tmp_path):
    run, pairs = as_authors(sraven_run())
    codes = capture(run, "compositional", tmp_path / "codes.npz", size=7, **pairs)
    batch = run.task.instances("compositional", np.arange(7))
    with torch.no_grad(), capture_codes(run.model, queries=26, keys=[20, 23]) as expected:
        run.model(batch.x, queries=slice(-3, None))
    for layer in range(2):
        assert codes[f"codes_layer_{layer}"].shape == (7, 2, 2)
        found = np.asarray(codes[f"codes_layer_{layer}"])
        np.testing.assert_allclose(found, expected[layer][:, :, 0].transpose(1, 2), rtol=1e-6, atol=1e-7)
    assert np.array_equal(codes["token_rules"][:, 26], batch.info["rules"][:, 2])


def test_held_out_combinations_are_those_of_training():
    ours = sraven_run()
    theirs, _ = as_authors(ours)
    for split, ids in ours.task.split_compositions.items():
        assert np.array_equal(theirs.task.split_compositions[split], ids)


def test_fuzzy_logic_has_one_query_point():
    run, pairs = as_authors(opened(override(preset("logic"), num_points=7, **TINY)))
    assert pairs == {"queries": [6], "keys": "self"} and run.task.inputs == "fixed_query"
    x = run.task.sample("compositional", 0, 5).x
    assert (x[:, -1] == x[0, -1]).all() and not (x[:, 0] == x[0, 0]).all()


def test_no_other_task_has_an_authors_way():
    with pytest.raises(ValueError, match="take no codes on the task lm; leave out the authors' way"):
        as_authors(opened(override(preset("lm-small"), **TINY, position="none")))


def test_the_commands(tmp_path, capsys):
    config = override(preset("sraven-small"), **TINY, steps=2, batch_size=4, eval_size=0)
    Trainer(config, tmp_path / "run").run()
    main(["codes", str(tmp_path / "run"), "--authors", "--size", "9"])
    assert "2 (query, key) pairs, 2 heads" in capsys.readouterr().out
    for more in (["--keys", "all"], ["--queries", "3"], ["--keys", "3"]):
        assert exit_code("codes", tmp_path / "run", "--authors", *more) == 2
        assert "--authors says itself which codes count" in capsys.readouterr().err
    assert exit_code("decode", tmp_path / "run", "--authors", "--patch") == 2
    assert "--authors is for decoders and --likeness: leave it out with --patch." in capsys.readouterr().err
    result = decode(tmp_path / "run", authors=True, fit_size=60, test_size=60, controls=("shuffled",), layers=[1])
    assert (result["card"]["authors"], result["card"]["keys"]) == (True, [13, 15])
    assert {row["source"] for row in result["rows"]} == {"codes", "shuffled"}
