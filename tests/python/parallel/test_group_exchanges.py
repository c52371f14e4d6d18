"""The exchanges of a process group of one rank, with calls of the library that only count."""

import typing

import pytest
import torch
import torch.distributed as dist

from anabranch.torch.parallel import peers

MIB = 1 << 20


class CountedExchange:
    """Copies x of one rank to the result; keeps the calls of all exchanges."""

    made: typing.ClassVar[list] = []
    refused = ""

    def __init__(self, device, rank, ranks, size):
        if self.refused:
            raise MemoryError(self.refused)
        self.size, self.calls, self.is_open = size, [], True
        self.made.append(self)

    def handle(self):
        return b"handle"

    def connect(self, handles):
        assert handles == [b"handle"]

    def run(self, name, stream, part=0, **arrays):
        assert self.is_open
        self.calls.append((name, part))

    def close(self):
        assert self.is_open
        self.is_open = False


@pytest.fixture
def exchanges(monkeypatch):
    capturing = []
    monkeypatch.setattr(CountedExchange, "made", [])
    monkeypatch.setattr(peers, "PeerExchange", CountedExchange)
    monkeypatch.setattr(peers, "_memory_of", lambda exchange: torch.zeros(exchange.size, dtype=torch.uint8))
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
        exchanges.gather("send", rows(mib))
    first, second = CountedExchange.made
    assert not first.is_open and second.is_open and len(second.calls) == 3
    assert 9 * MIB <= second.size <= 9 * MIB * 9 / 8
    exchanges.gather("other", rows(1))
    assert len(CountedExchange.made) == 3 and second.is_open


def test_an_exchange_of_a_graph_is_kept(exchanges):
    with_room = exchanges.gather("send", rows(4), in_place=True)
    exchanges.capturing.append(True)
    exchanges.release("send")
    exchanges.gather("send", rows(4))
    with pytest.raises(RuntimeError, match="transport: got the first call with 8388608 bytes in the capture"):
        exchanges.gather("send", rows(8))
    exchanges.capturing.clear()
    exchanges.gather("send", rows(8))
    assert [exchange.is_open for exchange in CountedExchange.made] == [True, True]
    assert with_room.shape == (4, MIB // 4)
    exchanges.close()
    assert not any(exchange.is_open for exchange in CountedExchange.made)


def test_a_result_in_place_is_released_once(exchanges):
    exchanges.gather("send", rows(1), in_place=True, part=1)
    exchanges.gather("send", rows(1), in_place=True, part=2)
    exchanges.release("send")
    exchanges.release("send")
    exchanges.exchange("send", rows(1))
    exchanges.release("send")
    exchanges.release("unknown")
    (made,) = CountedExchange.made
    assert made.calls == [("all_gather", 1), ("all_gather", 2), ("release", 0), ("all_to_all", 0)]


def test_a_failure_names_the_rank_and_leaves_nothing_behind(exchanges, monkeypatch):
    exchanges.gather("send", rows(1))
    monkeypatch.setattr(CountedExchange, "refused", "no memory")
    with pytest.raises(RuntimeError, match="transport: rank 0: no memory"):
        exchanges.gather("send", rows(8))
    assert exchanges.probe("send") == "rank 0: no memory"
    monkeypatch.setattr(CountedExchange, "refused", "")
    exchanges.gather("send", rows(1))
    first, second = CountedExchange.made
    assert not first.is_open and second.calls == [("all_gather", 0)]
