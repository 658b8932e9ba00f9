"""The model of a worker, and its construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_arguments
from vane_dagster.pipeline.lazy_instances import construct
from vane_dagster.worker import user_code
from vane_dagster.worker.isolation import one_process
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.udf_caller import UdfCaller


class LoadedModel:
    """The constructed model of a worker, or its function.

    Attributes:
        instance: The constructed model; None before.
        content: What it was constructed from; see `ModelSpec.content`.
    """

    def __init__(self) -> None:
        self._caller: UdfCaller | None = None
        self.instance: Any = None
        self.content = ""

    def construct(self, model: ModelSpec, archive: bytes, root: Path) -> None:
        """Construct the model from the run's own code, as the first action of a worker."""
        user_code.activate(user_code.unpack(archive, model.code, root))
        target, args, kwargs = user_code.load(model.payload, model.files)
        keep_arguments(args, kwargs)
        _failpoints.at_load(model.label)
        with one_process():
            made = construct(target, args, kwargs) if model.stateful else target
        self.hold(model, made)

    def hold(self, model: ModelSpec, made: Any) -> None:
        """Store a constructed model, or a function. Its modules are already imported."""
        self.instance, self.content = made, model.content
        self._caller = UdfCaller(model, made)

    @property
    def caller(self) -> UdfCaller:
        """The caller of the model."""
        assert self._caller is not None, "a worker without a model was given a call"
        return self._caller
