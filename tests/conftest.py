"""What all tests share: one local Ray head for the session, and pipelines run through Dagster."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import hypothesis
import pytest

# pytest-xdist's main process reads this file too, and needs no more than it imports here.
if TYPE_CHECKING:
    import vane_dagster as vd
    from support.llm_server import Server
    from support.results import Run

pytest.register_assert_rewrite("support")
TESTS = Path(__file__).parent
TIERS = ("unit", "integration", "dagster", "providers", "chaos", "examples")

gc.disable()  # until all is imported, which nothing frees

# How long an example takes says nothing on a shared machine. In CI, a run can be repeated.
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks each test with its tier, which is the folder that it is in.

    What test modules define travels to workers by value: a worker that imported a test module would
    import Dagster with it, which takes longer than most tests.
    """
    for item in items:
        if isinstance(item, pytest.Function):
            cloudpickle.register_pickle_by_value(item.module)
        tier = item.path.relative_to(TESTS).parts[0]
        assert tier in TIERS, f"{item.path} is in the folder of no tier: {', '.join(TIERS)}"
        item.add_marker(tier)


def pytest_collection_finish() -> None:
    """Collections of garbage pass over all that was imported until now, and are rare."""
    gc.freeze()
    gc.set_threshold(100_000, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_frozen() -> Iterator[None]:
    """Collections pass over what a test has imported, too, once its module is done."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Frees what is left once. pytest and the interpreter collect several times as they end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """Processes that tests start inherit this; in the background, a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _home() -> Iterator[None]:
    """A state folder of the session's own, so that no other head is found or stopped."""
    folder = tempfile.mkdtemp(prefix="vt-", dir="/tmp")
    before = os.environ.get("VANE_DAGSTER_HOME")
    os.environ["VANE_DAGSTER_HOME"] = folder
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"
    # Its thread logs tracebacks while tests parse, which CPython's parser does not bear
    # (python/cpython#106905).
    os.environ["RAY_DATA_USAGE_DISABLED"] = "1"
    # It starts as many actors to read footers, 32 by default, however few files there are.
    os.environ["RAY_DATA_PARQUET_FOOTER_NUM_ACTORS"] = "1"
    from support.instances import cheap_instances
    from support.warm_workers import kept_warm

    with cheap_instances(), kept_warm():
        yield
    if before is None:
        del os.environ["VANE_DAGSTER_HOME"]
    else:
        os.environ["VANE_DAGSTER_HOME"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(_home: None) -> Iterator[vd.LocalCluster]:
    """The session's Ray head: 2 CPUs, and 1 of a custom resource that only one worker can hold."""
    import vane_dagster as vd
    from vane_dagster.compute.local_head import LocalHead

    settings = {"name": "tests", "num_cpus": 2, "resources": {"accelerator": 1}}
    yield vd.LocalCluster(**settings)
    import ray

    ray.shutdown()
    LocalHead(**settings).stop()


@pytest.fixture
def ray_data(cluster: vd.LocalCluster) -> Iterator[Any]:
    """Ray Data, connected to the session's head; the workers that it leaves there are ended."""
    from vane_dagster.compute.actor_names import NAMESPACE

    module = pytest.importorskip("ray.data", reason="ray is installed without its extra data")
    cluster.connect()
    yield module
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE:
            ray.kill(ray.get_actor(**actor))
    ray.shutdown()


@pytest.fixture(params=["local", "ray"])
def compute(request: pytest.FixtureRequest) -> Any:
    """Both computes in turn: the same test has to pass on subprocesses and on Ray."""
    if request.param == "local":
        return request.getfixturevalue("local")
    import vane_dagster as vd

    return vd.RayCompute(cluster=request.getfixturevalue("cluster"))


@pytest.fixture(scope="module")
def local() -> vd.LocalCompute:
    """Subprocesses alone, for what does not depend on where the work is done. They start fast."""
    from support.warm_workers import WarmLocal

    return WarmLocal(num_cpus=2, resources={"accelerator": 1})


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of the session's S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture(scope="module")
def s3(s3_endpoint: str) -> dict[str, Any]:
    """Storage options of an S3 server whose bucket "lake" is empty."""
    import boto3

    from support.data import SECRET

    secrets = {"aws_access_key_id": "someone", "aws_secret_access_key": SECRET}
    connected = boto3.resource("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **secrets)
    lake = connected.create_bucket(Bucket="lake")
    lake.objects.all().delete()
    return {
        "key": "someone",
        "secret": SECRET,
        "endpoint_url": s3_endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }


@pytest.fixture
def materialize(tmp_path: Path) -> Run:
    """Materializes a pipeline through Dagster, with a store in the test's folder."""
    from support.results import materializing

    return materializing(tmp_path)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[Server, str]]:
    """A language model server that the tests of a module share, and its URL."""
    from support.llm_server import serving

    with serving() as found:
        yield found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model with random weights."""
    from benchmarks.tiny_llm import make

    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def vllm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM wants in the environment on a CPU, without a network."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
