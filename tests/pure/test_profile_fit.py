"""Fits of the profiler on times that are known, and everything else in it that needs no torch."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, Profile, load_profile, profile_names
from megatron_hdp.cost.profile import LinkProfile
from megatron_hdp.errors import ConfigError
from megatron_hdp.profiler.assemble import Fits, Links, Machine, Model, at_capacity, build, stage_fit
from megatron_hdp.profiler.cases import SHORTEST, Case, all_cases, grid, weight
from megatron_hdp.profiler.fit import area, check_unseen, fit, fit_layer, fit_line, fit_transfers
from megatron_hdp.profiler.match import check_nodes, check_profile, layer_name
from megatron_hdp.profiler.report import Findings, deliver, median_error, render
from megatron_hdp.profiler.request import ProfileRequest, check_out, parse_request
from megatron_hdp.profiler.ring_steps import RingSample, ring_steps
from megatron_hdp.profiler.samples import Measured, combine, middle, outliers

CAPACITY = 8192
A = (3e-11, 8e-11)
"""Seconds per token^2, forward and backward."""
ALONE = (4e-8, 5e-8)
"""Seconds per token of core attention."""
B = (6e-7, 1.3e-6)
PER_SEQUENCE, PER_MICROBATCH = 7e-6, 9e-5
LOSS, EMBEDDING = (2e-4, 3e-7), (1e-5, 2e-9)
"""Constant, and seconds per token."""


def truth(case, windows=(None,)):
    """Forward and backward seconds of one case under the model."""
    if case.kind in ("loss", "embedding"):
        constant, slope = LOSS if case.kind == "loss" else EMBEDDING
        return constant / 3 + slope * case.tokens / 3, 2 * (constant + slope * case.tokens) / 3
    if case.kind == "attention":
        window = None if None in windows else max(windows)
        return tuple(a * area(case.tokens, window) + e * case.tokens + 1e-5 for a, e in zip(A, ALONE))
    quadratic = np.mean([sum(area(s, w) for s in case.lengths) for w in windows])
    constant = PER_SEQUENCE * len(case.lengths) + PER_MICROBATCH
    return tuple(a * quadratic + b * case.tokens + constant for a, b in zip(A, B))


def times(windows=(None,), capacity=CAPACITY):
    return {case: truth(case, windows) for case in all_cases(capacity)}


def noisy(sigma, outlier_share, seed, repeats=9):
    """Medians of repeats with lognormal noise, some of which took ten times as long."""
    random = np.random.RandomState(seed)
    found = {}
    for case, true in times().items():
        factors = np.exp(sigma * random.randn(repeats, 2)) * np.where(random.rand(repeats, 1) < outlier_share, 10, 1)
        found[case] = middle([tuple(row) for row in factors * np.array(true)])
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_steps_of_rings_are_what_is_left(waits):
    """Of core attention on a ring, less its area, a first step like a local sequence's, and transfers if they count."""
    layer = fit_layer(times(), (None,), None, CAPACITY)
    rows, link, steps = (1e4, 2e4), LinkProfile(1e-5, 1e9), (3e-4, 7e-4)

    def on_ring(tokens, ring, factor):
        sent = [link.latency + bytes_ * tokens / link.bandwidth if waits else 0.0 for bytes_ in (1e4, 3e4)]
        parts = zip(A, ALONE, steps, sent, strict=True)
        seconds = [a * ring * tokens**2 + e * tokens + 1e-5 + (ring - 1) * (own + x) for a, e, own, x in parts]
        return RingSample(tokens, ring, tuple(factor * each for each in seconds))

    samples = [on_ring(tokens, ring, 1) for tokens in (64, 256) for ring in (2, 3)]
    samples.append(on_ring(64, 2, 10))  # an outlier
    assert ring_steps(samples, layer, rows, link if waits else None) == pytest.approx(steps, rel=0.02)
    assert ring_steps([on_ring(64, 2, 0.001)], layer, rows, None) == (0, 0)
    assert ring_steps([], layer, rows, None) is None


def test_coefficients_are_recovered():
    layer = fit_layer(times(), (None,), None, CAPACITY)
    assert layer.quadratic == pytest.approx(A, rel=1e-6)
    assert layer.layer.coefficients == pytest.approx((*B, PER_SEQUENCE, PER_MICROBATCH), rel=1e-5)
    assert layer.layer.worst < 1e-6
    assert layer.layer.r2 > 1 - 1e-9
    assert not layer.layer.is_poor
    unseen = check_unseen(times(), layer)
    assert len(unseen) == 6
    assert max(item.error for item in unseen) < 1e-6


@pytest.mark.parametrize("windows", [(1024,), (1024, None), (512, 512, 2048)])
def test_windows_are_areas(windows):
    layer = fit_layer(times(windows), windows, None if None in windows else max(windows), CAPACITY)
    assert layer.quadratic == pytest.approx(A, rel=1e-6)
    assert max(item.error for item in check_unseen(times(windows), layer)) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers(seed):
    """Every sixth sample took ten times as long: the medians do not care, and what the planner uses stays close."""
    found = noisy(0.05, 1 / 6, seed)
    layer = fit_layer(found, (None,), None, CAPACITY)
    assert layer.quadratic == pytest.approx(A, rel=0.1)
    assert layer.layer.coefficients[:2] == pytest.approx(B, rel=0.1)
    assert median_error(check_unseen(times(), fit_layer(found, (None,), None, CAPACITY))) < 0.08
    exact = [item for item in check_unseen(found, layer) if item.case.tokens > CAPACITY / 4]
    assert exact
    assert max(item.error for item in exact) < 0.2


def test_means_would_have_failed():
    """What makes the test above one of medians: the same samples averaged are far off."""
    random = np.random.RandomState(0)
    found = {}
    for case, true in times().items():
        factors = np.where(random.rand(9, 1) < 1 / 6, 10, 1) * np.ones((9, 2))
        found[case] = tuple((factors * np.array(true)).mean(axis=0))
    layer = fit_layer(found, (None,), None, CAPACITY)
    assert layer.layer.coefficients[0] > 1.2 * B[0]


def test_no_coefficient_is_negative():
    """A constant that is not there: with noise plain least squares would give negative ones."""
    random = np.random.RandomState(1)
    signs = []
    for _ in range(20):
        values = [1e-6 * size * math.exp(0.05 * random.randn()) for size in (64, 256, 1024, 4096)]
        found = fit_line("line", (64, 256, 1024, 4096), values, "tokens")
        assert min(found.coefficients) >= 0
        assert found.coefficients[1] == pytest.approx(1e-6, rel=0.2)
        signs.append(found.coefficients[0] == 0)
    assert any(signs)
    assert not all(signs)


def test_relative_errors_count_alike():
    """The small value is 1000 times smaller and still decides as much as the large one."""
    found = fit("x", [(1.0,), (1000.0,)], [2.0, 1000.0], ["small", "large"])
    assert found.coefficients[0] == pytest.approx(1.2, rel=1e-9)  # least squares of (x/2 - 1, x - 1)
    assert found.worst_at == "small"
    assert found.worst == pytest.approx(0.4)


def test_weights_choose_what_matters():
    found = fit("x", [(1.0,), (1.0,)], [1.0, 2.0], ["light", "heavy"], [0.01, 1.0])
    assert found.coefficients[0] == pytest.approx(2.0, rel=1e-3)
    assert found.worst_at == "heavy"  # an error of what hardly counts is no poor fit
    assert found.worst < 0.01


def test_poor_fits_are_called_poor():
    line = [1e-6 * size for size in (64, 256, 1024, 4096)]
    assert not fit_line("line", (64, 256, 1024, 4096), line, "tokens").is_poor
    curve = [1e-9 * size**2 for size in (64, 256, 1024, 4096)]
    assert fit_line("curve", (64, 256, 1024, 4096), curve, "tokens").is_poor
    bent = [value * factor for value, factor in zip(line, (1.0, 0.75, 1.0, 1.0))]
    assert fit_line("bent", (64, 256, 1024, 4096), bent, "tokens").is_poor
    assert not fit_line("bent", (64, 256, 1024, 4096), bent, "tokens", tolerance=0.5).is_poor


def test_outliers_are_counted():
    samples = [(1.0, 2.0)] * 5 + [(1.0, 9.0)]
    assert middle(samples) == (1.0, 2.0)
    assert outliers(samples) == (1, pytest.approx(10 / 3))
    assert outliers(samples[:5]) == (0, 1.0)


def test_ranks_are_combined():
    """Each rank's median counts once; a stage's case need not be on every rank."""
    layers, loss = Case("layers", (64,)), Case("loss", (64,))
    ranks = [{layers: [(1.0, 2.0)] * 3 + [(1.0, 20.0)]}, {layers: [(3.0, 4.0)], loss: [(5.0, 6.0)]}, {}]
    first, second = combine(ranks)
    assert first == Measured(layers, (2.0, 3.0), 5, 1, 7.0, 7 / 3)
    assert second == Measured(loss, (5.0, 6.0), 1, 0, 1.0, 1.0)


@pytest.mark.parametrize("capacity", [256, 1000, 4098, 8192, 131072])
def test_cases(capacity):
    cases = all_cases(capacity)
    lengths = grid(capacity)
    assert lengths[-1] == capacity
    assert all(b >= 2 * a - 2 for a, b in itertools.pairwise(lengths))
    assert lengths[0] >= SHORTEST / 2
    assert all(length % 2 == 0 and length >= 2 for case in cases for length in case.lengths)
    assert all(case.tokens <= capacity for case in cases)
    assert [case.tokens for case in cases] == sorted(case.tokens for case in cases)
    seen = {case.lengths for case in cases if case.kind == "layers" and not case.unseen}
    unseen = {case.lengths for case in cases if case.unseen}
    assert len(unseen) >= 4
    assert not seen & unseen
    assert weight(capacity, capacity) == 1
    assert weight(capacity // 64, capacity) == 0.25


def test_capacity_without_a_grid():
    with pytest.raises(ConfigError, match=r"--hdp-tokens-per-rank is 128.*at least 256"):
        all_cases(128)


# The profile


MODEL = Model("h64-f128-q4x16-kv2-32bit-tp1", 1, 256.0, 256.0, 256.0)
MACHINE = Machine("CPU rank: some, 1 thread per rank", "Python 3", 8e9, 16e9, 2)


def made(inside=True, across=False):
    found = times()
    layer = fit_layer(found, (None,), None, CAPACITY)
    activations = fit_line("activation bytes", (64, 1024, 8192), (64 * 1000 + 50, 1024 * 1000 + 50, 8192050), "tokens")
    fits = Fits(layer, activations, stage_fit(found, "loss"), stage_fit(found, "embedding"))
    link = fit_line("transfers", (1000, 10**6, 10**7), (1e-5 + 1e-6, 1e-5 + 1e-3, 1e-5 + 1e-2), "bytes")
    copies = (5e9, 6e9, 4e9, 3e9) if inside or across else (5e9, 6e9, None, None)
    links = Links(link if inside else None, link if across else None, *copies)
    return build("mine", "2026-11-30", MODEL, MACHINE, fits, links, CAPACITY), fits


def test_profile_has_what_was_measured():
    profile, _ = made()
    layer = profile.layer()
    assert profile.default_layer == MODEL.layer
    assert layer.attention_forward == pytest.approx(A[0], rel=1e-5)
    assert layer.attention_backward_factor == pytest.approx(A[1] / A[0], rel=1e-5)
    assert layer.linear_forward == pytest.approx(B[0], rel=1e-5)
    assert layer.linear_backward_factor == pytest.approx(B[1] / B[0], rel=1e-5)
    assert layer.sequence_constant == pytest.approx(PER_SEQUENCE, rel=1e-4)
    assert layer.microbatch_constant == pytest.approx(PER_MICROBATCH, rel=1e-4)
    assert layer.activation_per_token == pytest.approx(1000)
    assert layer.activation_constant == pytest.approx(50, rel=1e-3)
    assert layer.loss_per_token == pytest.approx(LOSS[1] + LOSS[0] * (1 / 3 + 2 / 3) / CAPACITY, rel=1e-4)
    assert layer.embedding_per_token == pytest.approx(EMBEDDING[1] + EMBEDDING[0] / CAPACITY, rel=1e-4)
    assert profile.inside_node.latency == pytest.approx(1e-5, rel=1e-4)
    assert profile.inside_node.bandwidth == pytest.approx(1e9, rel=1e-4)
    assert (profile.d2h_bandwidth, profile.h2d_bandwidth) == (5e9, 6e9)
    assert (profile.d2h_bandwidth_shared, profile.h2d_bandwidth_shared) == (4e9, 3e9)
    assert (profile.device_memory, profile.host_memory, profile.gpus_per_node) == (8e9, 16e9, 2)
    assert "R2 1.0000" in profile.calibrated["attention_forward"]
    assert Profile.from_json(profile.to_json()) == profile


def test_links_that_were_not_there_are_assumed():
    one_node, _ = made(inside=True)
    assert one_node.across_nodes == one_node.inside_node
    assert "one node" in one_node.assumed["across_nodes"]
    apart, _ = made(inside=False, across=True)
    assert apart.inside_node == apart.across_nodes
    assert "inside_node" in apart.assumed
    alone, _ = made(inside=False)
    assert alone.inside_node == load_profile("h100").inside_node
    assert "h100" in alone.assumed["inside_node, across_nodes"]
    assert alone.d2h_bandwidth_shared is None
    for profile in (one_node, apart, alone):
        assert Profile.from_json(profile.to_json()) == profile


def test_planner_computes_what_the_fit_says():
    """The report's predictions are the cost model's own."""
    profile, fits = made()
    layer = replace(profile.layer(), loss_per_token=0.0, embedding_per_token=0.0)  # not a part of layers
    model = CostModel(replace(profile, layers={MODEL.layer: layer}), layers_per_stage=1)
    for case in all_cases(CAPACITY):
        if case.kind == "layers":
            for phase, said in zip(("forward", "backward"), fits.layer.seconds(case.lengths)):
                picoseconds = int(np.sum(model.picoseconds(case.lengths, phase=phase)))
                picoseconds += model.microbatch_picoseconds(phase)
                assert picoseconds / 1e12 == pytest.approx(said, rel=1e-4)


def test_stage_without_cases_is_free():
    assert stage_fit({}, "loss") is None
    assert at_capacity(None, CAPACITY) == 0


def findings_of(found, fits, spread=1.0, odd=0):
    layer = fit_layer(found, (None,), None, CAPACITY)
    return Findings(
        measured=tuple(Measured(case, times, 9, odd, 1.0 + 3 * odd, spread) for case, times in found.items()),
        left_out=(Case("loss", (CAPACITY,)),),
        fits=replace(fits, layer=layer),
        unseen=check_unseen(found, layer),
        transfers=(fit_transfers("inside nodes", (1000, 2000, 4000), (2e-6, 3e-6, 5e-6), 2),),
        clock="clock",
        seconds=7.0,
    )


def report(found, spread=1.0, odd=0):
    profile, fits = made()
    return render(profile, findings_of(found, fits, spread, odd))


def test_report_comes_before_the_file(tmp_path, capsys):
    """A file that cannot be written after all costs nothing of what was measured."""
    profile, fits = made()
    findings = findings_of(times(), fits)
    deliver(profile, findings, str(tmp_path / "p.json"))
    said = capsys.readouterr().out
    assert said.startswith(render(profile, findings))
    assert f"written to {tmp_path / 'p.json'}" in said
    assert load_profile(tmp_path / "p.json") == profile
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory; the profile is printed above"):
        deliver(profile, findings, str(tmp_path / "none" / "p.json"))
    said = capsys.readouterr().out
    assert said.startswith(render(profile, findings))
    assert Profile.from_json(said[said.index("\n{\n") :]) == profile


def test_what_cannot_be_written_is_refused_ahead(tmp_path):
    check_out(str(tmp_path / "new.json"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("old")
    check_out(str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "old"
    for name, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "p.json", "none is no folder that can be written"),
        (tmp_path / "old.json" / "p.json", "old.json is no folder that can be written"),
        (tmp_path / ("x" * 300), "name too long"),
    ):
        with pytest.raises(ConfigError, match=f"--out .* cannot be written: .*{why}"):
            check_out(str(name))


def test_a_file_that_may_not_be_changed(tmp_path, monkeypatch):
    (tmp_path / "old.json").write_text("old")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="the file is there and may not be changed"):
        check_out(str(tmp_path / "old.json"))


def test_report_of_a_good_measurement():
    text = report(times(), odd=2)
    assert "WARNING" not in text
    assert "median error 0.0 %" in text
    assert "R2 1.0000, worst error 0.0 %" in text
    assert "2, worst 7.0 x" in text
    assert f"left out for want of time or memory: loss {CAPACITY}" in text
    assert "transfers inside nodes, rings of 2 ranks: 1.0 us, 1.00 GB/s each way" in text
    assert max(map(len, text.splitlines())) <= 160


def test_report_warns():
    random = np.random.RandomState(3)
    wild = {case: tuple(t * random.uniform(0.4, 2.5) for t in true) for case, true in times().items()}
    text = report(wild, spread=1.4)
    assert "WARNING: poor fit of whole layer, a known" in text
    assert "WARNING: unseen micro-batches are predicted with a median error of" in text
    assert "1.40 times as long on the slowest rank" in text


# Whose profile it is


def test_profiles_of_others_are_refused():
    profile, _ = made()
    assert check_profile(profile, MACHINE.hardware, MODEL.layer) is None
    with pytest.raises(
        ConfigError, match=r"measured on 'CPU rank: some.*this rank is 'NVIDIA H200'.*--hdp-force-profile"
    ):
        check_profile(profile, "NVIDIA H200", MODEL.layer)
    with pytest.raises(ConfigError, match=r"measured for layer h64-f128.*this model has h128"):
        check_profile(profile, MACHINE.hardware, "h128")
    with pytest.raises(
        ConfigError, match=r"^--hdp-profile /x/a.json \(profile mine\): .*`torchrun ... -m megatron_hdp"
    ):
        check_profile(profile, MACHINE.hardware, "h128", given="/x/a.json")
    forced = check_profile(profile, "NVIDIA H200", "h128", force=True)
    assert forced.startswith("WARNING")
    assert "NVIDIA H200" in forced
    assert "h128" in forced


def test_nodes_of_another_size_are_said():
    profile, _ = made()
    layer = profile.layer()
    assert check_nodes(profile, layer, 2) is None
    assert check_nodes(profile, layer, 8) == (
        "profile mine was measured with 2 processes on a node, this one has 8: plans believe in nodes of 2 pool ranks, "
        "and cost rings by that"
    )
    split = check_nodes(replace(profile, gpus_per_node=8), replace(layer, tensor_parallel=4), 2)
    assert "measured with 8 processes on a node, this one has 2: plans believe in nodes of 2 pool ranks" in split
    assert "nodes of 1 pool rank," in check_nodes(profile, replace(layer, tensor_parallel=4), 1)


def test_shipped_profiles_pass_everywhere():
    for name in profile_names():
        assert check_nodes(load_profile(name), load_profile(name).layer(), 3) is None
        assert check_profile(load_profile(name), "anything", "any layer") is None


def test_layer_names_tell_models_apart():
    shape = {
        "hidden": 4096,
        "ffn": 11008,
        "heads": 32,
        "kv_heads": 8,
        "head_size": 128,
        "gated": True,
        "experts": None,
        "element_bytes": 2,
        "tensor_parallel": 2,
    }
    others = {"hidden": 5120, "ffn": 13824, "heads": 40, "kv_heads": 32, "head_size": 64, "gated": False}
    others |= {"experts": (8, 2), "element_bytes": 4, "tensor_parallel": 1}
    names = {layer_name(**shape), *(layer_name(**{**shape, key: value}) for key, value in others.items())}
    assert len(names) == 1 + len(others)
    assert layer_name(**shape) == "h4096-f11008-glu-q32x128-kv8-16bit-tp2"


# The command line


def test_request():
    assert parse_request(["script.py", "--out", "x"]) == (
        ProfileRequest("profile.json", 150.0),
        ["script.py", "--out", "x"],
    )
    words = ["--out", "a.json", "--seconds=20", "script.py"]
    assert parse_request(words) == (ProfileRequest("a.json", 20.0), ["script.py"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--outt", "x"], "unknown option --outt"),
        (["--out"], "--out needs a value"),
        (["--out="], "--out needs the name of a file"),
        (["--out", "a\nb.json"], r"--out is 'a\\nb.json', must be printable"),
        (["--out", "a\udcff"], r"--out is 'a\\udcff', must be printable"),
        (["--seconds", "soon"], "--seconds is 'soon'"),
        (["--seconds", "nan"], "--seconds is 'nan'"),
        (["--seconds", "0"], "from 1 to 86400"),
    ],
)
def test_wrong_requests(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_request([*words, "script.py"] if len(words) > 1 or "=" in words[0] else words)


def test_the_command_says_how(capsys):
    from megatron_hdp.cli import main

    assert main(["profile"]) == 0
    assert "-m megatron_hdp" in capsys.readouterr().out


def test_documentation_names_the_flags():
    text = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text()
    for word in ("--out", "--seconds", "--hdp-profile"):
        assert word in text
