"""Our communicator under Megatron's own pipeline loops, stage by stage in one process: every tensor has its shape."""

from types import SimpleNamespace

import pytest
from planned_loops import Loop, Passed, patch, run

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.seams.p2p import refuse_pipeline

WAYS = [
    {"parts": 1},
    {"parts": 2},  # messages of an exchange together; Megatron refuses it for two stages
    {"parts": 2, "overlap": True},
    {"parts": 2, "overlap": True, "flush": True},
    {"parts": 3, "overlap": True},
]


def counts(stages: int, parts: int) -> list[int]:
    return [stages * turns for turns in (1, 2, 3)] if parts > 1 else list(range(1, 2 * stages + 2))


def column(monkeypatch: pytest.MonkeyPatch, tokens: list[int], stages: int, **way) -> list[Passed]:
    return [run(monkeypatch, Loop(stage, stages, **way), tokens) for stage in range(stages)]


def of(passed: Passed, way: str, phase: str) -> list[int]:
    return [rows for was, which, rows in passed.messages if (was, which) == (way, phase)]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_tensor_has_the_shape_of_its_micro_batch(monkeypatch, way, forward_only):
    patch(monkeypatch)
    for stages in (2, 3, 4):
        if stages == 2 and way["parts"] > 1 and not way.get("overlap"):
            continue
        for count in counts(stages, way["parts"]):
            tokens = [10 + 3 * slot for slot in range(count)]  # all differ
            stage_by_stage = column(monkeypatch, tokens, stages, forward_only=forward_only, **way)
            total = 0
            for stage, passed in enumerate(stage_by_stage):
                assert passed.forward == count * way["parts"]
                assert passed.backward == (0 if forward_only else passed.forward)
                after = stage_by_stage[(stage + 1) % stages]
                assert of(passed, "send", "forward") == of(after, "receive", "forward")
                assert of(after, "send", "backward") == of(passed, "receive", "backward")
                total += len(of(passed, "send", "forward")) + len(of(passed, "send", "backward"))
            assert total == (1 if forward_only else 2) * count * (stages * way["parts"] - 1)


@pytest.mark.parametrize("way", [way for way in WAYS if way["parts"] == 1 or way.get("overlap")], ids=str)
def test_between_two_stages_activations_and_gradients_keep_one_order(monkeypatch, way):
    """Both go from the same process to the same other one, which tells them apart by nothing but their order."""
    patch(monkeypatch)
    for count in counts(2, way["parts"]):
        first, second = column(monkeypatch, [10 + 3 * slot for slot in range(count)], 2, **way)
        for sender, receiver in ((first, second), (second, first)):
            sent = [(phase, rows) for way_, phase, rows in sender.messages if way_ == "send"]
            assert sent == [(phase, rows) for way_, phase, rows in receiver.messages if way_ == "receive"]


def test_tensor_of_another_shape_than_planned_is_named(monkeypatch):
    patch(monkeypatch)
    with pytest.raises(SeamError, match=r"stage 0 of 2: micro-batch 1 sends .* \[14, 1, 4\] to_next, .* \[12, 1, 4\]"):
        run(monkeypatch, Loop(0, 2), [10, 12, 14], sent=[10, 14, 14])


def test_other_numbers_of_messages_than_planned_are_named(monkeypatch):
    patch(monkeypatch)
    with pytest.raises(SeamError, match=r"stage 1 of 2: .* ended with messages left: 1 from_previous, 1 to_previous"):
        run(monkeypatch, Loop(1, 2), [10, 12, 14], sent=[10, 12])
    with pytest.raises(SeamError, match=r"a message from_previous more than the 2 micro-batches"):
        run(monkeypatch, Loop(1, 2), [10, 12], sent=[10, 12, 14])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p"),
        ({"mtp_standalone": True}, "multi-token prediction alone"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 4},
            "--microbatch-group-size-per-virtual-pipeline-stage is 4: .* set it to 2",
        ),
    ],
)
def test_what_has_other_shapes_or_another_order_is_refused(changes, words):
    config = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": 2,
        "use_ring_exchange_p2p": False,
        "mtp_standalone": False,
    }
    refuse_pipeline(SimpleNamespace(**config))
    with pytest.raises(ConfigError, match=words):
        refuse_pipeline(SimpleNamespace(**{**config, **changes}))
    refuse_pipeline(SimpleNamespace(**{**config, **changes, "pipeline_model_parallel_size": 1}))
