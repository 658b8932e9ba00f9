"""What a worker of a server's pool holds: the interface of a running replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from vane_dagster.servers.launch import ServerStatus


class RunningServer(ABC):
    """A running replica of a server. Constructing it starts the server and waits until it is ready.

    Its methods may be called from any thread.
    """

    starting: ClassVar[RunningServer | None] = None
    """The server that this process is constructing; its constructor has not returned yet."""

    @abstractmethod
    def status(self) -> ServerStatus:
        """Return the state of the server. It is not asked for it, so this never blocks."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise an exception if the server is gone for good."""

    @abstractmethod
    def probe(self, timeout: float) -> str:
        """Ask the server for its health.

        Args:
            timeout: Seconds that it may take.

        Returns:
            What is wrong; empty if it answers.
        """

    @abstractmethod
    def read_log(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Read a part of the server's log, with secrets masked.

        Args:
            offset: Position of its first byte; a negative one counts from the end.
            limit: The largest number of bytes to read.

        Returns:
            The bytes, and the position after them, at which the next part starts.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the server after its requests in flight, and return after it has ended."""
