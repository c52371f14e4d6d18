"""The exchanges of a process group of one rank, with calls of the library that only count."""

import ctypes
import typing

import pytest
import torch
import torch.distributed as dist

from anabranch.peer_exchange import ALL_BUFFERS, START
from anabranch.torch.parallel import peers

MIB = 1 << 20


class CountedExchange:
    """Copies x of one rank to the result; keeps the calls of all exchanges."""

    made: typing.ClassVar[list] = []
    refused = ""

    def __init__(self, device, rank, ranks, sizes):
        if self.refused:
            raise MemoryError(self.refused)
        self.sizes, self.calls, self.is_open = tuple(sizes), [], True
        self.made.append(self)
        self.pointer = ctypes.c_void_p(len(self.made))

    def handle(self):
        return b"handle"

    def connect(self, handles):
        assert handles == [b"handle"]

    def run(self, name, stream, buffer=0, part=0, **arrays):
        assert self.is_open
        self.calls.append((name, buffer, part))

    def close(self):
        assert self.is_open
        self.is_open = False


@pytest.fixture
def exchanges(monkeypatch):
    capturing = []
    monkeypatch.setattr(CountedExchange, "made", [])
    monkeypatch.setattr(peers, "PeerExchange", CountedExchange)
    monkeypatch.setattr(
        peers, "_memory_of", lambda exchange: [torch.zeros(n, dtype=torch.uint8) for n in exchange.sizes]
    )
    monkeypatch.setattr(
        peers, "_send", lambda x, number, buffer: CountedExchange.made[number - 1].run("all_gather", 0, buffer, START)
    )
    monkeypatch.setattr(peers.private, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = peers.GroupExchanges(dist.group.WORLD, 0)
    found.capturing = capturing
    yield found
    dist.destroy_process_group()


def rows(mib):
    return torch.zeros((mib, MIB // 4))


def test_an_exchange_is_replaced_by_a_larger_one(exchanges):
    for mib in (1, 9, 8, 9):
        exchanges.gather(rows(mib))
    first, second = CountedExchange.made
    assert not first.is_open and second.is_open and len(second.calls) == 3
    assert len(second.sizes) == 1 and 9 * MIB <= second.sizes[0] <= 9 * MIB * 9 / 8
    exchanges.start(rows(1), 0)
    assert len(CountedExchange.made) == 3 and second.is_open
    assert CountedExchange.made[2].sizes == (MIB,) * 3


def test_an_exchange_of_a_graph_is_kept(exchanges):
    with_room = exchanges.start(rows(4), 0)
    exchanges.capturing.append(True)
    exchanges.release(0)
    exchanges.start(rows(4), 0)
    with pytest.raises(RuntimeError, match="transport: got the first call with 8388608 bytes in the capture"):
        exchanges.start(rows(8), 0)
    exchanges.capturing.clear()
    exchanges.start(rows(8), 0)
    assert [exchange.is_open for exchange in CountedExchange.made] == [True, True]
    assert with_room.shape == (4, MIB // 4)
    exchanges.close()
    assert not any(exchange.is_open for exchange in CountedExchange.made)


def test_a_buffer_is_released_once(exchanges):
    exchanges.release(0, 1, 2)
    x = rows(1)
    exchanges.start(x, 0)
    exchanges.start(x, 1)
    exchanges.finish(x, 1)
    exchanges.release(0)
    exchanges.release(0)
    exchanges.released(1)
    exchanges.release(1)
    exchanges.start(x, 0)
    exchanges.abandon()  # an exception ends the pass
    exchanges.start(x, 0)
    exchanges.start_return(x)
    exchanges.finish_return(x)
    exchanges.release(0, 2)
    (made,) = CountedExchange.made
    gather, release = (lambda buffer, part: ("all_gather", buffer, part)), (lambda buffer: ("release", buffer, 0))
    assert made.calls == [
        gather(0, 1), gather(1, 1), gather(1, 2), release(0), gather(0, 1), release(ALL_BUFFERS),
        gather(0, 1), ("all_to_all", 2, 1), ("all_to_all", 2, 2), release(0), release(2),
    ]  # fmt: skip


def test_a_failure_names_the_rank_and_leaves_nothing_behind(exchanges, monkeypatch):
    exchanges.gather(rows(1))
    monkeypatch.setattr(CountedExchange, "refused", "no memory")
    with pytest.raises(RuntimeError, match=r"got 'p2p', whose buffers .*: rank 0: no memory; 'ring' needs"):
        exchanges.gather(rows(8))
    assert exchanges.probe() == "rank 0: no memory"
    monkeypatch.setattr(CountedExchange, "refused", "")
    exchanges.gather(rows(1))
    first, second = CountedExchange.made
    assert not first.is_open and second.calls == [("all_gather", 0, 0)]
