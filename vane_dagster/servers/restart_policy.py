"""When a server is restarted, how long to wait before, and when to give up. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SupervisionLimits:
    """The times and limits of a server's supervision that its declaration does not set.

    Attributes:
        first_backoff_s: Wait before the first restart; each further one waits twice as long.
        max_backoff_s: The longest wait before a restart.
        max_failed_starts: Failed starts in a row after which the server has failed.
        max_crashes: Crashes of a server that was ready after which it has failed.
        stable_s: Uptime after which earlier crashes no longer count.
        first_poll_s: Wait before the first health check of a start; each further one waits twice as
            long.
        max_poll_s: The longest wait between health checks of a start.
        check_interval_s: Wait between health checks of a server that is ready.
        probe_timeout_s: Seconds that a health check may take.
        log_bytes: Size of a log file. The last two are kept.
    """

    first_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    max_failed_starts: int = 3
    max_crashes: int = 12
    stable_s: float = 600.0
    first_poll_s: float = 0.05
    max_poll_s: float = 1.0
    check_interval_s: float = 5.0
    probe_timeout_s: float = 10.0
    log_bytes: int = 64 * 2**20


class RestartPolicy:
    """The history of one server's failures, and the decision after each of them."""

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._failed_starts = self._crashes = 0

    def record_ready(self) -> None:
        """Record that a start has succeeded."""
        self._failed_starts = 0

    def after_failed_start(self) -> float | None:
        """Return the seconds to wait before the next start; None to give up."""
        self._failed_starts += 1
        return self._backoff()

    def after_crash(self, uptime: float) -> float | None:
        """Return the seconds to wait before the restart of a server that was ready."""
        self._crashes = 1 if uptime >= self._limits.stable_s else self._crashes + 1
        return self._backoff()

    @property
    def exhausted(self) -> str:
        """The limit that was reached, for people; empty if none was."""
        limits = self._limits
        if self._failed_starts >= limits.max_failed_starts:
            return f"{self._failed_starts} starts in a row failed"
        if self._crashes >= limits.max_crashes:
            minutes = limits.stable_s / 60
            return f"{self._crashes} crashes without {minutes:g} minutes of uptime between them"
        return ""

    def _backoff(self) -> float | None:
        if self.exhausted:
            return None
        failures = self._crashes + self._failed_starts
        return min(self._limits.first_backoff_s * 2.0 ** (failures - 1), self._limits.max_backoff_s)
