"""Small checks of the CPU mode, run inside it on two ranks by test_cpu_mode.py. Prints one line per failed check."""

import concurrent.futures
import multiprocessing
import os
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def check_factories():
    for device in ("cuda", "cuda:1", 0, torch.device("cuda", 1), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.empty_like(torch.ones(1), device=device).device.type == "cpu"
        assert torch.ones(1).new_zeros(3, device=device).device.type == "cpu"
        assert torch.ones(1).to(device).device.type == "cpu"
        assert torch.ones(1).to(device=device, dtype=torch.float16).dtype == torch.float16
        assert torch.ones(1).cuda(device).device.type == "cpu"
    assert torch.tensor([1], device=f"cuda:{torch.cuda.current_device()}").device.type == "cpu"
    assert torch.ones(1).to(torch.float64).dtype == torch.float64
    assert torch.empty(1, pin_memory=True).device.type == "cpu"


def check_meta_device_still_works():
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2, device="meta").to("meta").device.type == "meta"
    assert torch.nn.Linear(2, 2, device="cuda").weight.device.type == "cpu"


def check_types():
    value = torch.ones(1)
    assert value.type() == "torch.cuda.FloatTensor"
    assert value.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert value.type(torch.cuda.HalfTensor).dtype == torch.float16
    assert value.type("torch.cuda.LongTensor").dtype == torch.int64
    assert isinstance(value, torch.cuda.FloatTensor)


def check_streams_and_events():
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream() is not side
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        sum(range(100_000))
        side.record_event(end)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    end.synchronize()
    assert 0.0 < start.elapsed_time(end) < 10_000.0
    torch.cuda.current_stream().wait_stream(side)
    torch.ones(1).record_stream(side)


def check_random_state():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    assert torch.equal(torch.cuda.default_generators[0].get_state(), torch.get_rng_state())


def check_properties():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
    assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == properties.total_memory
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0


def check_pinned_copy_is_a_copy():
    value = torch.ones(2)
    pinned = value.pin_memory()
    value.zero_()
    assert pinned.tolist() == [1.0, 1.0]


def check_loader_and_its_workers():
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=1)
    assert [batch[0].cuda().tolist() for batch in loader] == [[0, 1], [2, 3]]


def check_optimizer_step():
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() != [1.0, 1.0]


def check_other_threads():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.zeros(1, device="cuda").type()).result() == "torch.cuda.FloatTensor"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.is_available()))
    thread.start()
    thread.join()
    assert seen == [True]


def check_loading_what_a_gpu_saved():
    folder = Path(os.environ["RECORD"]).parent
    path = folder / f"saved{os.environ['RANK']}.pt"
    # what tells the archive of a GPU run from ours is the tag of each storage
    storage_tag = torch.serialization.location_tag
    torch.serialization.location_tag = lambda storage: "cuda:0"
    try:
        torch.save({"weight": torch.arange(3.0)}, path)
    finally:
        torch.serialization.location_tag = storage_tag
    for location in (None, "cpu", "cuda:1", torch.device("cuda", 0)):
        loaded = torch.load(path, map_location=location)["weight"]
        assert loaded.tolist() == [0.0, 1.0, 2.0], location
        assert loaded.device.type == "cpu"


def check_gpu_packages_are_hidden():
    for name in ("transformer_engine", "apex", "flash_attn"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{name} could be imported")


def check_groups_are_gloo():
    assert dist.get_backend() == "gloo"
    options = dist.ProcessGroupNCCL.Options() if dist.is_nccl_available() else None
    group = dist.new_group([0, 1], backend="nccl", pg_options=options)
    assert dist.get_backend(group) == "gloo"
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()])


def check_averages():
    rank = dist.get_rank()
    value = torch.full((2,), float(rank), device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    assert value.tolist() == [0.5, 0.5]
    output, whole = torch.empty(1), torch.tensor([float(rank), rank + 4.0])
    dist.reduce_scatter_tensor(output, whole, op=dist.ReduceOp.AVG)
    assert output.item() == (0.5, 4.5)[rank]
    assert whole.tolist() == [float(rank), rank + 4.0]


def check_all_to_all_with_tensor_sizes():
    rank = dist.get_rank()
    sizes = torch.tensor([1, 1])
    output = torch.empty(2)
    dist.all_to_all_single(output, torch.tensor([10.0 * rank, 10.0 * rank + 1]), sizes, sizes)
    assert output.tolist() == [float(rank), 10.0 + rank]


def check_gather_and_scatter_of_unequal_rows():
    rank = dist.get_rank()
    gathered = [torch.empty(1, 2), torch.empty(3, 2)]
    dist.all_gather(gathered, torch.full((1 + 2 * rank, 2), float(rank)))
    assert [each.tolist() for each in gathered] == [[[0.0, 0.0]], [[1.0, 1.0]] * 3]
    output = torch.empty(1 + 2 * rank)
    dist.reduce_scatter(output, [torch.ones(1), torch.arange(3.0)])
    assert output.tolist() == ([2.0], [0.0, 2.0, 4.0])[rank]
    empty = [torch.empty(0, 2), torch.empty(2, 2)]
    dist.all_gather(empty, torch.full((2 * rank, 2), 5.0))
    assert empty[1].tolist() == [[5.0, 5.0]] * 2


def check_pairwise():
    rank = dist.get_rank()
    received = torch.empty(1, device="cuda")
    send = dist.P2POp(dist.isend, torch.tensor([float(rank)]), 1 - rank)
    receive = dist.P2POp(dist.irecv, received, 1 - rank)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received.item() == 1 - rank


def in_child(number):
    return number + 1, torch.zeros(1, device="cuda").type()


def check_spawned_child_has_the_mode_and_finds_functions_here():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_child, (1,)) == (2, "torch.cuda.FloatTensor")


def main():
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    failed = 0
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                print(f"PASSED {name}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
