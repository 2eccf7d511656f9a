"""The weaving of pieces: posts in order, last exchanges behind the next piece, local work in the waits."""

import random
from functools import partial

from megatron_hdp.attention.steps import Event, Filler, drive, inside


def work(name, exchanges, log):
    """A piece that posts one exchange ahead of each block it computes, like the walk."""
    log.append(f"{name} post 0")
    yield Event.STARTED
    for number in range(exchanges):
        if number == exchanges - 1:
            yield Event.POSTED
        log.append(f"{name} compute {number}")
        yield Event.WAIT
        log.append(f"{name} wait {number}")
        if number + 1 < exchanges:
            log.append(f"{name} post {number + 1}")
    log.append(f"{name} end")


def locals_of(count, log):
    return [partial(log.append, f"local {i}") for i in range(count)]


def test_posts_keep_the_order_of_the_pieces_and_everything_is_done_once():
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        log: list[str] = []
        count = rng.randint(0, 6)
        shares = locals_of(count, log)
        drive((work(f"p{i}", n, log) for i, n in enumerate(sizes)), Filler(shares, sum(sizes)))
        posts = [line for line in log if "post" in line]
        assert posts == [f"p{i} post {number}" for i, n in enumerate(sizes) for number in range(n)]
        assert [line for line in log if "local" in line] == [f"local {i}" for i in range(count)]
        assert [line for line in log if "end" in line] == [f"p{i} end" for i in range(len(sizes))]
        assert len(set(log)) == len(log) == count + 3 * sum(sizes) + len(sizes)


def test_the_last_exchange_of_a_piece_hides_behind_the_first_block_of_the_next():
    log: list[str] = []
    drive((work(name, 1, log) for name in "ab"), Filler([], 2))
    assert log == ["a post 0", "b post 0", "a compute 0", "a wait 0", "a end", "b compute 0", "b wait 0", "b end"]
    log.clear()
    drive((work(name, 2, log) for name in "ab"), Filler([], 4))
    assert log.index("b post 0") < log.index("b compute 0") < log.index("a wait 1")


def test_local_work_is_spread_over_the_waits():
    log: list[str] = []
    drive([work("a", 4, log)], Filler(locals_of(4, log), 4))
    for i in range(4):
        assert log.index(f"a compute {i}") < log.index(f"local {i}") < log.index(f"a wait {i}")
    log.clear()
    drive([work("a", 4, log)], Filler(locals_of(2, log), 4))
    assert log.index("a wait 0") < log.index("local 0") < log.index("a wait 1")
    assert log.index("a wait 2") < log.index("local 1") < log.index("a wait 3")


def test_an_exchange_inside_another_shows_its_waits_only():
    def piece():
        yield Event.STARTED
        yield Event.POSTED
        yield Event.WAIT
        return 7

    def outer(seen):
        seen.append((yield from inside(piece())))

    seen: list[int] = []
    assert list(outer(seen)) == [Event.WAIT]
    assert seen == [7]
