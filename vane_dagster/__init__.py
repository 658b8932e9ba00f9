"""Offline batch inference as Dagster assets on Ray, with models that stay loaded.

Importing this package imports neither ray nor torch. Each name is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vane_dagster._lazy import public_names

if TYPE_CHECKING:
    from vane_dagster import checks as checks
    from vane_dagster import errors as errors
    from vane_dagster.fingerprint.local_file import local_file as local_file
    from vane_dagster.orchestration.component import PipelineComponent as PipelineComponent
    from vane_dagster.orchestration.diff import diff as diff
    from vane_dagster.orchestration.io_manager import FragmentStore as FragmentStore
    from vane_dagster.orchestration.pipeline import Pipeline as Pipeline
    from vane_dagster.orchestration.read import load as load
    from vane_dagster.orchestration.read import quarantine as quarantine
    from vane_dagster.orchestration.resources import LocalCluster as LocalCluster
    from vane_dagster.orchestration.resources import LocalCompute as LocalCompute
    from vane_dagster.orchestration.resources import RayCompute as RayCompute
    from vane_dagster.orchestration.trace import trace as trace
    from vane_dagster.pipeline.decorators import cls as cls
    from vane_dagster.pipeline.decorators import func as func
    from vane_dagster.pipeline.decorators import method as method
    from vane_dagster.pipeline.pipeline import Stage as Stage
    from vane_dagster.pipeline.records import Asset as Asset
    from vane_dagster.pipeline.records import Children as Children
    from vane_dagster.pipeline.records import Failures as Failures
    from vane_dagster.pipeline.records import Model as Model
    from vane_dagster.pipeline.records import Reuse as Reuse
    from vane_dagster.pipeline.records import Workers as Workers
    from vane_dagster.pipeline.servers import Server as Server
    from vane_dagster.pipeline.servers import TritonServer as TritonServer
    from vane_dagster.pipeline.servers import VLLMServer as VLLMServer
    from vane_dagster.providers.content import audio as audio
    from vane_dagster.providers.content import document as document
    from vane_dagster.providers.content import image as image
    from vane_dagster.sources.csv_files import csv as csv
    from vane_dagster.sources.delta import delta as delta
    from vane_dagster.sources.file import File as File
    from vane_dagster.sources.huggingface import huggingface as huggingface
    from vane_dagster.sources.iceberg import iceberg as iceberg
    from vane_dagster.sources.images import images as images
    from vane_dagster.sources.json_files import json as json
    from vane_dagster.sources.lance import lance as lance
    from vane_dagster.sources.parquet import parquet as parquet
    from vane_dagster.sources.raw_files import files as files
    from vane_dagster.sources.ray_dataset import ray_dataset as ray_dataset
    from vane_dagster.sources.row_ids import row_id as row_id
    from vane_dagster.sources.stored import stored as stored
    from vane_dagster.sources.table import table as table
    from vane_dagster.sources.text_files import text as text
    from vane_dagster.types.tensors import tensor as tensor

    __version__: str

__getattr__, __dir__ = public_names(__name__, __file__)
