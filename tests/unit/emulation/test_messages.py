"""Messages of a rank to ranks that are copies of it: what it sends is received in order, whichever was called first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.emulation.environment import resolve_cluster
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.messages import MAX_UNREAD, MAX_UNREAD_ALIKE
from lightning_osdp.emulation.process_group import join
from lightning_osdp.errors import ConfigurationError

LAST = 7


@pytest.fixture(autouse=True)
def world() -> Iterator[Any]:
    join(EmulatedLinks(resolve_cluster("h100-80gb-nvlink", 8)))
    yield dist.group.WORLD
    dist.destroy_process_group()


def full(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def test_receive_that_is_called_first_gets_what_is_sent_after_it() -> None:
    received = torch.zeros(2)
    works = [dist.irecv(received, LAST), dist.isend(full(3), 1)]
    for work in works:
        work.wait()
    assert received.equal(full(3))


@pytest.mark.parametrize("is_receive_first", [True, False])
def test_messages_in_flight_arrive_in_the_order_of_their_tag(is_receive_first: bool) -> None:
    received = [torch.zeros(2) for _ in range(3)]

    def receive() -> list[Any]:
        return [dist.irecv(one, 1, tag=tag) for one, tag in zip(received, (0, 0, 5), strict=True)]

    def send() -> list[Any]:
        return [dist.isend(full(value), 1, tag=tag) for value, tag in ((12, 5), (10, 0), (11, 0))]

    works = receive() + send() if is_receive_first else send() + receive()
    for work in works:
        work.wait()
    assert [one.tolist() for one in received] == [[10.0] * 2, [11.0] * 2, [12.0] * 2]


def test_message_of_a_peer_is_the_one_that_was_sent_to_it() -> None:
    received = {peer: torch.zeros(2) for peer in (3, 1, 2)}
    works = [dist.isend(full(peer), peer) for peer in (1, 2, 3)]
    works += [dist.irecv(tensor, peer) for peer, tensor in received.items()]
    for work in works:
        work.wait()
    assert {peer: tensor.tolist() for peer, tensor in received.items()} == {peer: [peer] * 2 for peer in received}


def test_receive_that_was_waited_for_is_not_changed_by_a_later_message() -> None:
    received = full(9)
    dist.irecv(received, LAST).wait()
    assert received.equal(full(0))
    dist.send(full(3), 1)
    assert received.equal(full(0))
    again = full(9)
    dist.recv(again, LAST)
    assert again.equal(full(3))


def test_receive_is_asked_whether_it_is_completed() -> None:
    received = full(9)
    work = dist.irecv(received, LAST)
    end = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < end
    dist.send(full(3), 1)
    assert received.equal(full(0))
    value = dist.irecv(full(9), LAST).get_future().wait()
    assert value[0].equal(full(3))


def test_integers_that_are_sent_later_are_known_and_others_are_an_error() -> None:
    received = torch.zeros(1, dtype=torch.int64)
    work = dist.irecv(received, LAST)
    dist.send(torch.tensor([4]), 1)
    work.wait()
    assert received.tolist() == [4]
    with pytest.raises(ConfigurationError, match="a message from rank 7 is not emulated"):
        dist.irecv(torch.zeros(3, dtype=torch.int64), LAST).wait()


def test_rank_that_only_sends_keeps_few_messages(world: Any) -> None:
    for number in range(3 * MAX_UNREAD_ALIKE):
        dist.send(full(number), 1)
    assert len(world._mailbox._unread) == MAX_UNREAD_ALIKE
    for tag in range(2 * MAX_UNREAD):
        dist.send(full(tag), 1, tag=tag)
    assert len(world._mailbox._unread) == MAX_UNREAD
