"""The comparison of methods on text: equal parameters, equal tokens, equal FLOPs where it says so."""

import pytest

from headcode.experiments import experiment
from headcode.experiments.language import flop_matched, language_base, training_flops
from headcode.nn import Transformer
from headcode.presets import override, preset

METHODS = ("softmax", "linear", "hyla")


def parameters(config):
    return sum(parameter.numel() for parameter in Transformer(config.model).parameters())


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_the_methods_differ_in_nothing_but_the_method(scale):
    base = language_base(scale)
    configs = {method: override(base, method=method) for method in METHODS}
    assert len({parameters(config) for config in configs.values()}) == 1
    assert len({(c.steps, c.batch_size, c.task) for c in configs.values()}) == 1
    assert parameters(configs["hyla"]) == (461_056 if scale == "laptop" else parameters(configs["linear"]))


def test_flops_are_matched_to_a_step():
    softmax, hyla = (override(preset("lm-paper"), method=method) for method in ("softmax", "hyla"))
    matched = flop_matched(hyla, softmax)
    assert hyla.steps > matched.steps > 0.9 * hyla.steps
    assert abs(training_flops(matched) - training_flops(softmax)) <= training_flops(hyla) / hyla.steps
    assert flop_matched(override(softmax, method="linear"), softmax).steps == softmax.steps
    # One more product of the values' width for each pair: by hand, per token and layer.
    extra = training_flops(hyla) / hyla.steps - training_flops(softmax) / softmax.steps
    assert extra == 3 * 2 * 256 * 1024 * 6 * 512.5 * 512


def test_the_papers_scale_says_what_it_takes():
    with pytest.raises(ValueError, match=r"reads 129,999,831,040 tokens of C4 \(about 260 GB of token shards\)"):
        list(experiment("language").runs("paper"))


@pytest.mark.slow
def test_smoke(tmp_path):
    from headcode.experiments import reproduce

    outcome = reproduce(experiment("language"), "smoke", tmp_path, threads=1)
    assert {row["method"] for row in outcome.study.rows} == set(METHODS)
    assert all(3 < row["validation/bits_per_byte"] < 9 for row in outcome.study.rows)
    # A run this short has no FLOP-matched partner, and so no verdict about one.
    assert [verdict.statement.split(" is")[0] for verdict in outcome.verdicts] == ["Softmax", "HYLA", "Softmax"]
    assert (tmp_path / "language" / "smoke" / "language.png").stat().st_size > 10_000
