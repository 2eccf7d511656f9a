"""The C++ cost model gives the integers of the Python one, which is the authority."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.planner import core_backend

if core_backend() == "c++":
    from megatron_hdp import _core
else:
    pytest.skip("megatron_hdp._core is not built", allow_module_level=True)

PHASES = ("forward", "backward", "total")
BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
ENDS = {name: replace(layer, loss_per_token=2e-6, embedding_per_token=3e-7) for name, layer in H100.layers.items()}
ENDS = replace(H100, layers=ENDS)
CALLS = {name: replace(layer, ring_step_forward=3e-4, ring_step_backward=7e-4) for name, layer in H100.layers.items()}
CALLS = replace(H100, layers=CALLS)


@st.composite
def models(draw):
    profile = draw(st.sampled_from([BYTESCALE, H100, ENDS, CALLS]))
    return CostModel(
        profile,
        draw(st.integers(1, 40)),
        window=draw(st.none() | st.integers(1, 3000) | st.sampled_from([4096, 65_536, 1 << 22])),
        recompute=draw(st.sampled_from(["none", "full"])),
        layer=draw(st.sampled_from(sorted(profile.layers))),
        pad_multiple=draw(st.sampled_from([2, 4, 6, 16])),
    )


def compare(model, lengths, rings, starts):
    arguments, tiers = core_arguments(model), model.tier(starts, rings)
    for phase, name in enumerate(PHASES):
        for tier in (tiers, 1 - tiers):
            got = _core.cost_picoseconds(arguments, lengths, rings, tier, phase)
            np.testing.assert_array_equal(got, model.picoseconds(lengths, rings, tier, name))
    plain = [model.piece_tokens(lengths, rings), tiers, [model.microbatch_picoseconds(p) for p in PHASES]]
    np.testing.assert_array_equal(_core.cost_plain(arguments, lengths, starts, rings), np.concatenate(plain))


@settings(max_examples=150, deadline=None)
@given(models(), st.lists(st.tuples(st.integers(1, 1 << 30), st.integers(1, 2000), st.integers(0, 99)), min_size=1))
def test_random_pieces_cost_the_same(model, cases):
    lengths, rings, starts = np.array(cases, dtype=np.int64).T.copy()
    compare(model, np.minimum(lengths, model.max_length), rings, starts)


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_small_lengths_and_rings_cost_the_same(window, recompute):
    """Chunks of one token and windows on, before and behind the edge of a chunk."""
    lengths, rings = (x.ravel() for x in np.meshgrid(np.arange(1, 400), np.arange(1, 25)))
    for model in (CostModel(BYTESCALE, 2), CostModel(H100, 1, pad_multiple=4), CostModel(CALLS, 3)):
        compare(replace(model, window=window, recompute=recompute), lengths, rings, lengths % 17)


def test_the_longest_sequence_does_not_wrap():
    for model in (CostModel(BYTESCALE, 32), CostModel(H100, 80, window=4096, recompute="full")):
        lengths = np.full(7, model.max_length, dtype=np.int64)
        rings = np.array([1, 2, 3, 64, 4096, 10**6, model.max_length], dtype=np.int64)
        compare(model, lengths, rings, 0 * rings)
        assert np.all(_core.cost_picoseconds(core_arguments(model), lengths, rings, 0 * rings, 2) > 0)


def test_a_wrong_number_of_arguments_is_refused():
    one = np.ones(1, dtype=np.int64)
    with pytest.raises(ValueError, match="24 numbers, got 23"):
        _core.cost_picoseconds(core_arguments(CostModel(BYTESCALE, 1))[:-1], one, one, one, 0)
