"""A run's claims on fragments, held by the keeper of a Ray cluster."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence

from vane_dagster.compute.client import KeeperClient
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, Group
from vane_dagster.errors import ClusterLostError, ComputeError

_BEATS = 6
_log = logging.getLogger(__name__)


class RayClaims:
    """See `work_claims.Claims`. Expire like a lease, some time after their process was killed.

    Args:
        keeper: The cluster's keeper.
        run_id: The run.
        lasts: Seconds after which the claims of a killed run expire.
    """

    def __init__(self, keeper: KeeperClient, run_id: str, lasts: float) -> None:
        self._keeper, self._run_id, self._lasts = keeper, run_id, lasts
        self._holder = f"{run_id}-{secrets.token_hex(4)}"
        self._held: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="vane-claims", daemon=True).start()

    def ask(
        self,
        groups: Sequence[Group],
        release: Sequence[bytes] = (),
        ages: Mapping[str, float] | None = None,
    ) -> ClaimAnswer:
        """See `Claims.ask`. Without a keeper everything is granted: claims only save work."""
        with self._lock:
            for key in release:
                self._held.pop(key, None)
            try:
                answer = self._call(groups, release, ages or {})
                if not answer.is_known and self._held:  # a new keeper, or the claims had expired
                    again = [Group(scope, (key,)) for key, scope in self._held.items()]
                    self._call(again, (), {})
            except ClusterLostError:  # the driver notices by itself
                return ClaimAnswer([""] * len(groups))
            except ComputeError as error:
                _log.warning("fragments are computed without claims: %s", error)
                return ClaimAnswer([""] * len(groups))
            for group, other in zip(groups, answer.held_by):
                if not other:
                    self._held.update(dict.fromkeys(group.keys, group.scope))
            return answer

    def _call(
        self, groups: Sequence[Group], release: Sequence[bytes], ages: Mapping[str, float]
    ) -> ClaimAnswer:
        request = ClaimRequest(self._holder, self._run_id, self._lasts, groups, release, ages)
        answer: ClaimAnswer = self._keeper.ask("claim", request)
        return answer

    def close(self) -> None:
        """See `Claims.close`."""
        import ray

        self._over.set()
        with self._lock:
            is_lost = self._keeper.watch is not None and bool(self._keeper.watch.lost)
            if ray.is_initialized() and not is_lost:
                self._keeper.tell("end_claims", self._holder)

    def _beat(self) -> None:
        import ray

        while not self._over.wait(self._lasts / _BEATS) and ray.is_initialized():
            self.ask(())
