"""Messages from one rank to another. Other ranks are copies of this one: it receives what it sends, in that order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.emulation.argument_checks import check_known

MAX_UNREAD, MAX_UNREAD_ALIKE = 128, 8
"""Messages that are kept for a receive to come, and those of them with one target and tag: who only sends must not fill
the memory. Older ones are forgotten."""

Start = Callable[[Callable[[], None], "list[Tensor]"], dist.Work]
"""Starts a message on its link: called with what fills tensors, and the tensors whose memory it reads or fills."""


class Mailbox:
    """Messages that were sent and not received yet, and receives whose message was not sent yet."""

    def __init__(self) -> None:
        self._unread: deque[tuple[int, int, Tensor]] = deque(maxlen=MAX_UNREAD)
        self._waiting: list[Receive] = []
        self._last: Tensor | None = None

    def send(self, tensor: Tensor, target: int, tag: int, start: Start) -> dist.Work:
        """Send a message: it fills the first receive that waits for it, or is kept for the next."""
        message = self._last = tensor.detach()
        fitting = [one for one in self._waiting if one.tag == tag and _are_alike(one.tensor, message)]
        if not fitting:
            same = [one for one in self._unread if one[:2] == (target, tag)]
            if len(same) == MAX_UNREAD_ALIKE:
                self._forget(same[0])
            self._unread.append((target, tag, message))
            return start(lambda: None, [message])
        receive = next((one for one in fitting if one.source == target), fitting[0])
        self._waiting.remove(receive)
        receive.arrival = start(lambda: _copy(receive.tensor, message), [receive.tensor, message])
        return receive.arrival

    def receive(self, tensor: Tensor, source: int, tag: int, start: Start) -> dist.Work:
        """Receive the first message that was sent with the tag, rather to this peer than to another, or wait for it."""
        fitting = [one for one in self._unread if one[1] == tag and _are_alike(one[2], tensor)]
        found = next((one for one in fitting if one[0] == source), fitting[0] if fitting else None)
        if found is not None:
            self._forget(found)
            return Receive(self, tensor, source, tag, start(lambda: _copy(tensor, found[2]), [tensor]))
        receive = Receive(self, tensor, source, tag, start(lambda: None, [tensor]))
        self._waiting.append(receive)
        return receive

    def _forget(self, unread: tuple[int, int, Tensor]) -> None:
        # By identity: equality of tuples would compare the tensors.
        self._unread = deque((one for one in self._unread if one is not unread), maxlen=MAX_UNREAD)

    def close(self, receive: Receive) -> None:
        """Make up a message that was not sent until it is used: the last one sent if it is alike, else zeros.

        Raises:
            ConfigurationError: it would be of integers, which are not known.
        """
        if not any(one is receive for one in self._waiting):
            return
        self._waiting = [one for one in self._waiting if one is not receive]
        if self._last is not None and _are_alike(self._last, receive.tensor):
            _copy(receive.tensor, self._last)
        else:
            check_known("message", [receive.tensor], receive.source)
            with torch.no_grad():
                receive.tensor.zero_()


class Receive(dist.Work):
    """A message on its way. Its tensor has it once the receive was waited for, even if it is sent after that.

    Args:
        mailbox: where it waits for its message.
        tensor: is filled.
        source: rank of the group that it comes from.
        tag: of the message.
        link: lets the time of the link pass.

    Attributes:
        arrival: the message, if it was sent after the receive was called.
    """

    def __init__(self, mailbox: Mailbox, tensor: Tensor, source: int, tag: int, link: dist.Work) -> None:
        super().__init__()
        self.tensor, self.source, self.tag = tensor, source, tag
        self.arrival: dist.Work | None = None
        self._mailbox, self._link = mailbox, link

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the message is there."""
        self._link.wait()
        self._mailbox.close(self)
        return True if self.arrival is None else self.arrival.wait()

    def is_completed(self) -> bool:
        """Return whether the message is there."""
        if not self._link.is_completed():
            return False
        self._mailbox.close(self)
        return self.arrival is None or self.arrival.is_completed()

    def result(self) -> list[Tensor]:
        """Return the tensor in a list."""
        return [self.tensor]

    def get_future(self) -> Any:
        """Return a future that has the tensor once the message is there."""
        self._mailbox.close(self)
        return (self.arrival or self._link).get_future()

    def _source_rank(self) -> int:
        return self.source


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _copy(target: Tensor, message: Tensor) -> None:
    with torch.no_grad():
        target.copy_(message)
