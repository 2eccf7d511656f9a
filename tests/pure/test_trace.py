"""Spans of a step and the file that Chrome's trace viewer reads."""

import json

import pytest

from megatron_hdp.attention.trace import COMPUTE, EXCHANGE, WAIT, Trace, chrome_trace, exchange_seconds, lane_seconds


def one_step(shift: float = 0.0) -> Trace:
    """Two exchanges, one of them in flight while two blocks are computed, then a wait for it."""
    trace = Trace()
    trace.clock_offset = 100.0 - shift
    trace.add("keys 1", EXCHANGE, shift + 1.0, shift + 4.0)
    trace.add("block 0", COMPUTE, shift + 1.1, shift + 3.0)
    trace.add("for keys 1", WAIT, shift + 3.5, shift + 4.0)
    trace.add("keys 2", EXCHANGE, shift + 3.0, shift + 4.5)
    trace.add("block 1", COMPUTE, shift + 4.0, shift + 6.0)
    return trace


def test_a_span_is_noted_even_if_its_body_raises():
    trace = Trace()
    with trace.span("outer", COMPUTE), pytest.raises(ValueError, match="inside"), trace.span("inner", WAIT):
        raise ValueError("inside")
    (inner, wait, begin, end), (outer, compute, first, last) = trace.events
    assert (inner, wait, outer, compute) == ("inner", WAIT, "outer", COMPUTE)
    assert first <= begin <= end <= last


def test_chrome_trace_has_exchanges_in_flight_over_compute_and_survives_json():
    data = json.loads(json.dumps(chrome_trace([(3, one_step())])))
    complete = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in data["traceEvents"] if e["ph"] == "X"}
    begins = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "b"}
    ends = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2
    flights = {e["name"]: (e["ts"], ends[key]["ts"]) for key, e in begins.items()}
    assert flights["keys 1"] == pytest.approx((0.0, 3e6))
    assert complete["block 0"] == pytest.approx((0.1e6, 2.0e6))
    begin, end = complete["block 0"]
    assert flights["keys 1"][0] < begin < end < flights["keys 1"][1]
    lanes = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert all(lanes[e["tid"]] == e["cat"] for e in data["traceEvents"] if e["ph"] != "M")
    assert {e["pid"] for e in data["traceEvents"]} == {3}


def test_ranks_are_aligned_by_the_time_they_have_in_common():
    data = chrome_trace([(0, one_step()), (1, one_step(shift=50.0))])  # the second one's counter started earlier
    blocks = [e for e in data["traceEvents"] if e["ph"] == "X" and e["name"] == "block 1"]
    assert [e["pid"] for e in blocks] == [0, 1]
    assert blocks[0]["ts"] == pytest.approx(blocks[1]["ts"])
    assert chrome_trace([])["traceEvents"] == []


def test_exchange_seconds_count_overlapping_flights_once_and_waits_within_them():
    flying, waited = exchange_seconds(one_step())
    assert flying == pytest.approx(3.5)
    assert waited == pytest.approx(0.5)
    assert lane_seconds(one_step(), COMPUTE) == pytest.approx(3.9)
    assert exchange_seconds(Trace()) == (0.0, 0.0)
