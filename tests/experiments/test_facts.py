"""Experiments at paper scale, and presets, against the table of what is known of the paper's runs."""

import itertools
import math

import pytest

from headcode.experiments import EXPERIMENTS, experiment, planned_runs
from headcode.experiments._table_a1 import TABLE_A1
from headcode.presets import get_field, preset, presets_of
from headcode.run import MODEL_DERIVED
from headcode.sweep import config_hash
from tests.experiments.facts import FACTS, OPTIMISER_A3, REPORTED_A1, TABLE_A3


def values(config, fields):
    """A field's value, or those of several fields that go together."""
    return get_field(config, fields) if isinstance(fields, str) else tuple(get_field(config, name) for name in fields)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.experiment)
def test_the_grid_at_paper_scale_is_that_of_the_facts(fact):
    runs = [config for _, config in planned_runs(experiment(fact.experiment), "paper")]
    for fields, expected in fact.grid.items():
        assert {values(config, fields) for config in runs} == set(expected), fields
    crossed = set(itertools.product(*fact.grid.values()))
    assert {tuple(values(config, fields) for fields in fact.grid) for config in runs} == crossed
    assert len(runs) == len(crossed) == len({config_hash(config) for config in runs})
    assert all(config.task.seed == config.seed for config in runs)


def test_each_fact_says_where_it_is_from():
    assert {fact.experiment for fact in FACTS} <= set(EXPERIMENTS)
    assert all(fact.source and fact.shows.startswith(("Fig", "Table")) for fact in FACTS)


def test_table_a1_as_reported():
    assert TABLE_A1.keys() == REPORTED_A1.keys()
    for name, model in TABLE_A1.items():
        ours = [100 * number for number in (*model.reported("logic"), *model.reported("sraven"))]
        assert all(map(math.isclose, ours, REPORTED_A1[name])), name


@pytest.mark.parametrize("name", TABLE_A3)
def test_presets_are_those_of_table_a3(name):
    config = preset(name)
    told = {**TABLE_A3[name], **OPTIMISER_A3}
    own = {field: getattr(config.model, field) for field in MODEL_DERIVED}
    assert {field: own[field] if field in own else get_field(config, field) for field in told} == told


def test_larger_sraven_presets_change_width_or_depth_alone():
    base = preset("sraven")
    for name in set(presets_of("sraven")) & {"sraven-width-2", "sraven-width-4"}:
        factor, model = int(name[-1]), preset(name).model
        for field in ("dim", "num_heads", "qk_dim", "v_dim", "mlp_dim"):
            assert getattr(model, field) == factor * getattr(base.model, field)
        assert preset(name).replace(model=base.model) == base
    for depth in (8, 16):
        deep = preset(f"sraven-depth-{depth}")
        assert deep.replace(model=deep.model.replace(num_layers=4)) == base and deep.model.num_layers == depth


def test_the_papers_language_model():
    """130 billion tokens, to a step. Table A3's sizes make 35.3 million parameters: 50 counts the embedding twice."""
    config = preset("lm-paper")
    tokens_of_a_step = config.batch_size * config.task.context
    assert 0 <= 130_000_000_000 - config.steps * tokens_of_a_step < tokens_of_a_step
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    embedding = 32_000 * 512
    assert config.model.num_parameters == 6 * layer + embedding + 2 * 512
    assert round((config.model.num_parameters + embedding) / 1e6, 1) == 51.7
