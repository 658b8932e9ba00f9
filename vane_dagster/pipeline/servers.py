"""Declarations of model servers: vLLM, Triton, and any other command."""

from __future__ import annotations

import inspect
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from vane_dagster._arguments import (
    mapping,
    number,
    parse_concurrency,
    path_text,
    positional,
    positive,
    seconds,
    text,
)
from vane_dagster._keywords import known_keywords
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.local_file import LocalFile
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.pipeline.options import STARTUP_SECONDS
from vane_dagster.pipeline.records import Workers
from vane_dagster.providers.vllm_arguments import OPERATIONAL_ARGUMENTS
from vane_dagster.servers.handle import VLLM, HostUrls, ServerHandle
from vane_dagster.servers.launch import Launch
from vane_dagster.servers.launch import flags as flags_of
from vane_dagster.types.callables import check_call, is_function, unwrapped

if TYPE_CHECKING:
    from typing import Unpack

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_OWN_FLAGS = ("api_key", "host", "model", "port", "ssl_certfile", "ssl_keyfile", "uds")
_OPERATIONAL_FLAGS = frozenset(
    {
        *OPERATIONAL_ARGUMENTS,
        "api_server_count",
        "data_parallel_size",
        "disable_access_log_for_endpoints",
        "disable_log_requests",
        "disable_uvicorn_access_log",
        "enable_log_outputs",
        "hf_token",
        "log_config_file",
        "max_log_len",
        "otlp_traces_endpoint",
        "uvicorn_log_level",
    }
)
_PRIVATE_SOCKETS = {"VLLM_RPC_BASE_PATH": "{folder}"}
"""What the sockets of its processes get is unpickled."""
_OWN_ENVIRONMENT = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""For an interpreter of another environment: it must not import the worker's packages."""
_WITH_PATH = "fn(ports, model_path)"
_TRITON_RUNNER = (
    "{triton_runner}", "{cloudpickle}", "{payload}", "{port}", "{grpc_port}", "{metrics_port}",
)  # fmt: skip
_TRITON_PORTS = ("port", "grpc_port", "metrics_port")
_PYTRITON_ADDRESSES = {
    f"PYTRITON_TRITON_CONFIG_{protocol}_ADDRESS": "{host}" for protocol in ("HTTP", "GRPC")
}
"""Where PyTriton listens unless its function says otherwise; its default is every address."""
_OF_STAGES = ("max_batches", "max_rss", "keyed_env_vars", "execution_backend")
"""The fields of `Workers` that only workers of stages have."""
_FIELDS = {each.name: f"write replicas=vd.Workers({each.name}=...)" for each in fields(Workers)}
_FLAGS = "; write a flag of `vllm serve` as flags=dict(...)"


class ServerArguments(TypedDict, total=False):
    """The arguments that all kinds of servers take; see `Server`."""

    name: str | None
    replicas: int | tuple[int, int] | Workers | None
    per_node: int | None
    gpus: float | None
    idle_minutes: float | None
    liveness_timeout_s: float
    drain_timeout_s: float


class ModelServer(ServerHandle):
    """A declared server. Stages and pipelines that declare it equally share its replicas.

    It reaches workers as a `ServerHandle`.

    Attributes:
        name: Name for people and the command line.
        workers: The replicas, each of which has a worker of its own.
        replicas: Minimum and maximum number of replicas.
        per_node: Replicas on each node that can hold one, in place of `replicas`.
        idle_minutes: Minutes that it stays up when nothing uses it.
        bundle: The resources that one replica reserves, by Ray's names.
        env_vars: Names of environment variables that are sent to it.
        keyed: What counts in fragment keys, because it may change answers.
        command: The command line, with placeholders.
        label: Kind and name, for messages.
        key: Identifies the server to workers.
    """

    def __init__(
        self,
        default_name: str,
        launch: Launch,
        keyed: Mapping[str, Any],
        *,
        name: str | None = None,
        replicas: int | tuple[int, int] | Workers | None = None,
        per_node: int | None = None,
        gpus: float | None = None,
        idle_minutes: float | None = None,
        liveness_timeout_s: float = 60.0,
        drain_timeout_s: float = 30.0,
    ) -> None:
        where = f"vd.{type(self).__name__}"
        words = [str(word) for word in launch.command]
        keep_arguments(keyed, dict(launch.env), *flags_of(words))
        self.name = name or _NAME_CHARACTERS.sub("-", default_name).strip("-.")
        expected = "letters, digits, '.', '_' and '-'. Give the server a name by name="
        text(where, "name", self.name, expected, _NAME)
        if not isinstance(replicas, Workers):
            replicas = Workers(parse_concurrency(where, "replicas", replicas, "replicas"))
        if wrong := [field for field in _OF_STAGES if getattr(replicas, field)]:
            raise DefinitionError(f"{where}: {names(wrong)} is for workers of stages; leave it out")
        if per_node is not None and replicas.count is not None:
            raise DefinitionError(f"{where}: expected either replicas or per_node")
        number(where, "idle_minutes", idle_minutes, "a number from 0 up", lambda given: given >= 0)
        seconds(where, "liveness_timeout_s", liveness_timeout_s)
        seconds(where, "drain_timeout_s", drain_timeout_s)
        self.workers, self.idle_minutes = replicas, idle_minutes
        self.replicas = parse_concurrency(where, "replicas", replicas.count) or (1, 1)
        self.per_node = positive(where, "per_node", per_node)
        self.bundle = replicas._bundle(where, gpus or 0)
        self.env_vars = tuple(sorted(set(replicas.env_vars)))
        self.keyed = {"kind": self.kind, **keyed}
        self.command = launch.command
        self.label = f"{self.kind} {self.name}"
        self._launch = replace(
            launch,
            label=self.label,
            startup_timeout_s=replicas.startup_timeout_s or STARTUP_SECONDS,
            liveness_timeout_s=liveness_timeout_s,
            drain_timeout_s=drain_timeout_s,
        )
        # Plain text alone: no file is read, because workers import declarations too.
        started = (repr(self._launch), sorted(launch.env.items()), self.keyed.get("version"))
        pool = (self.replicas, per_node, idle_minutes, replicas.max_concurrency, self.env_vars)
        super().__init__(digest(*started, *pool, sorted(self.bundle.items())))

    def __repr__(self) -> str:
        return f"vd.{type(self).__name__}(name={self.name!r})"

    @property
    def model(self) -> str:
        """Name of the model in requests; empty if the server has none."""
        return self._launch.model

    @property
    def host_to_http_url(self) -> HostUrls:
        """URLs for HTTP by host name: ``http://host:port``; see `ServerHandle`."""
        return HostUrls(self, "http")

    @property
    def host_to_grpc_url(self) -> HostUrls:
        """URLs for gRPC by host name: ``grpc://host:port``; see `ServerHandle`."""
        return HostUrls(self, "grpc")

    def launch(self) -> Launch:
        """Return how a replica is started.

        Raises:
            DefinitionError: If a function cannot be sent to it.
        """
        return self._launch

    def identity(self) -> str:
        """Return the digest of everything that a replica is started from; 16 hex digits.

        The content of local files that it names counts, unless a version is declared.

        Raises:
            CodeIdentityError: If a part has no stable identity.
        """
        files = LocalFiles(read="version" not in self.keyed)
        started = [value_digest(each, self.label, files) for each in (self.keyed, self._launch)]
        return digest("server", *started, sorted(self.bundle.items()), self.env_vars)[:16]


def servers_by_key(servers: Iterable[ModelServer]) -> dict[str, ModelServer]:
    """Return servers by their key, those that are equal once."""
    by_key: dict[str, ModelServer] = {}
    for server in servers:
        other = by_key.setdefault(server.key, server)
        if other is not server and other.identity() != server.identity():
            raise DefinitionError(
                f"two servers are named {server.name!r} and differ only in code or files; pass "
                "different names"
            )
    return by_key


class Server(ModelServer):
    """Any server with a health endpoint, started by a command on each node that needs one.

    A function or class receives the server as an argument, with ``url``, ``grpc_url``, ``model``,
    ``api_key`` and ``headers`` of a replica, preferably on the worker's own node. ``with
    server.request() as endpoint`` chooses a replica for each request.

    Declarations with the same command, name, timeouts and reservation are the same server, whose
    replicas stages and pipelines share, even if `replicas` or `idle_minutes` differ. If
    `idle_minutes` differs, the value of the run that used the server last applies.

    A replica that crashes or hangs is restarted on the same ports, after 1 to 30 s. Only rows whose
    requests were in flight are requested again. If three starts in a row fail, or if there are
    twelve crashes without ten minutes of uptime, the stages fail with the last lines of the log. A
    row that ends its server three times fails alone, with `ServerDied`. Processes of a server end
    with its worker. If the node is lost, the replica is replaced, if necessary on another node; a
    replica of `per_node` may then share a node with another one.

    Args:
        command: The command line. ``{port}`` is replaced by a free port, ``{host}`` by the address
            to bind to, ``{grpc_port}`` and ``{metrics_port}`` by other free ports, and ``{python}``
            by the worker's interpreter. The command runs in another working folder: name files by
            absolute paths, or send them by `vd.local_file`.
        health: Path that answers with status 200 to 299 once the server is ready.
        model: Name of the model in requests, if the server has one.
        env_vars: Environment variables of the server with their values, which are part of fragment
            keys. Placeholders are replaced as in `command`.
        api_key_env: Name of the variable in which the server expects its API key. Each replica gets
            a random key. Default: the server has no key.
        version: Replaces the command, and the content of files that it names, in fragment keys. Use
            it if the server writes to one of these files, or if its answers depend on code that the
            command does not name.
        name: Name for people and the command line. Default: from the model or the program.
        replicas: Number of replicas, (min, max) depending on the cluster's free resources, or
            `vd.Workers` with the resources that each replica reserves and the names of environment
            variables that are sent to it. There, ``startup_timeout_s`` (1800) limits the time until
            a replica is ready, and ``max_concurrency`` is the number of requests in flight to a
            replica from one worker of `prompt` or `embed`.
        per_node: Number of replicas on each node that has room, instead of `replicas`.
        gpus: GPUs that a replica reserves. Replicas with fractions share a GPU, but nothing
            enforces the fraction: set ``gpu_memory_utilization`` or a similar flag.
        idle_minutes: Minutes that an unused server stays up. Default: the compute resource's.
        liveness_timeout_s: Seconds without a successful health check after which a replica is
            restarted. Default: 60.
        drain_timeout_s: Seconds that a replica has to finish its requests when it is stopped,
            between SIGTERM and SIGKILL. Default: 30.

    Raises:
        DefinitionError: If an argument is invalid.

    Example:
        Triton with a model repository, which counts in fragment keys with the content of its files:

        ```python
        import requests

        import vane_dagster as vd

        triton = vd.Server(
            ["tritonserver", "--model-repository", "/models", "--http-address", "{host}",
             "--http-port", "{port}", "--grpc-address", "{host}", "--grpc-port", "{grpc_port}",
             "--metrics-port", "{metrics_port}"],
            health="/v2/health/ready",
            gpus=1,
        )  # fmt: skip


        def double(batch, triton):
            given = {"name": "x", "datatype": "FP64", "shape": [len(batch["x"]), 1]}
            given["data"] = batch["x"].to_pylist()
            url = f"{triton.url}/v2/models/doubler/infer"
            answer = requests.post(url, json={"inputs": [given]}, timeout=60)
            answer.raise_for_status()
            return {"y": answer.json()["outputs"][0]["data"]}


        pipeline = vd.Pipeline("numbers", source=vd.parquet("numbers/*.parquet"), id="id")
        given = {"schema": {"y": "DOUBLE"}, "fn_kwargs": {"triton": triton}}
        pipeline.map_batches("doubled", double, **given)
        ```
    """

    @known_keywords("vd.Server", advice=_FIELDS)
    def __init__(
        self,
        command: Sequence[str | os.PathLike[str] | LocalFile],
        health: str = "/health",
        *,
        model: str = "",
        env_vars: Mapping[str, str] | None = None,
        api_key_env: str | None = None,
        version: str | None = None,
        **options: Unpack[ServerArguments],
    ) -> None:
        where = "vd.Server"
        command = positional(where, "command", command, "a list of the program and its arguments")
        words: tuple[Any, ...] = tuple(_word(where, "command", part, "text") for part in command)
        variables = _variables(where, env_vars)
        used = " ".join([*map(str, words), *variables.values()])
        if "{port}" not in used:
            raise DefinitionError(
                f"{where}: command has no {{port}}, which is replaced by a free port; write for "
                'example "--port", "{port}"'
            )
        if not isinstance(health, str) or not health.startswith("/"):
            raise DefinitionError(f"{where}: health is {health!r}; expected a path like '/health'")
        launch = Launch(
            "",
            words,
            health,
            tuple(port for port in _TRITON_PORTS if port == "port" or f"{{{port}}}" in used),
            variables,
            text(where, "api_key_env", api_key_env, "its name") if api_key_env else None,
            text(where, "model", model, "its name in requests") if model else "",
        )
        keyed: dict[str, Any] = {"command": command, "env_vars": variables, "model": model}
        if version is not None:
            keyed = {"version": str(version)}
        super().__init__(model or os.path.basename(str(words[0])), launch, keyed, **options)


class VLLMServer(ModelServer):
    """vLLM's server with OpenAI's API.

    Unlike the provider "vllm", the server ignores unknown sampling parameters. Some results need a
    flag: ``enable_prompt_tokens_details`` for cached tokens in the usage, ``reasoning_parser`` for
    `include_reasoning`, ``{"runner": "pooling", "convert": "embed"}`` for `embed`. To use an
    adapter that it serves (``enable_lora``, ``lora_modules``), pass ``vd.Model("reviews",
    options={"server": llm})``. The GPUs of a replica are on one node.

    Args:
        model: A model's name, the path of its folder, or `vd.local_file` of it.
        flags: Flags of ``vllm serve``: ``{"max_model_len": 4096}`` becomes
            ``--max-model-len 4096``, True becomes ``--flag``, False ``--no-flag``, a list several
            values and a dict JSON. Flags that change no answers, such as `gpu_memory_utilization`,
            are not part of fragment keys.
        python: The Python interpreter with vLLM. Default: the worker's.
        name: Name for people and the command line. Default: from the model.
        replicas: Number of replicas, (min, max) depending on the cluster's free resources, or
            `vd.Workers` with the resources that each replica reserves and the names of environment
            variables that are sent to it. There, ``startup_timeout_s`` (1800) limits the time until
            a replica is ready, and ``max_concurrency`` is the number of requests in flight to a
            replica from one worker of `prompt` or `embed`.
        per_node: Number of replicas on each node that has room, instead of `replicas`.
        gpus: GPUs that a replica reserves. Replicas with fractions share a GPU, but nothing
            enforces the fraction: set ``gpu_memory_utilization`` or a similar flag.
        idle_minutes: Minutes that an unused server stays up. Default: the compute resource's.
        liveness_timeout_s: Seconds without a successful health check after which a replica is
            restarted. Default: 60.
        drain_timeout_s: Seconds that a replica has to finish its requests when it is stopped,
            between SIGTERM and SIGKILL. Default: 30.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    kind = VLLM

    @known_keywords("vd.VLLMServer", advice=_FIELDS, more=_FLAGS)
    def __init__(
        self,
        model: str | os.PathLike[str] | LocalFile,
        flags: Mapping[str, Any] | None = None,
        *,
        python: str | os.PathLike[str] | None = None,
        **options: Unpack[ServerArguments],
    ) -> None:
        where = "vd.VLLMServer"
        path = _word(where, "model", model, "a name or path")
        given = _flags(where, flags)
        short = os.path.basename(str(path).rstrip("/"))
        served = given.setdefault("served_model_name", [short])
        words: list[Any] = ["--model", path, "--host", "{host}", "--port", "{port}"]
        for flag, value in sorted(given.items()):
            word = f"--{flag.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(word if value else word.replace("--", "--no-", 1))
            else:
                words += [word, *map(_flag_word, value)]
        launch = Launch(
            "",
            (_python(where, python), "-m", "vllm.entrypoints.openai.api_server", *words),
            env={**_PRIVATE_SOCKETS, **(_OWN_ENVIRONMENT if python else {})},
            key_env="VLLM_API_KEY",
            model=served[0],
        )
        counted = {flag: given[flag] for flag in sorted(set(given) - _OPERATIONAL_FLAGS)}
        super().__init__(short, launch, {"model": model, "flags": counted}, **options)


class TritonServer(ModelServer):
    """NVIDIA's Triton with a function that serves a model by PyTriton.

    Args:
        fn: A function that starts Triton and serves until SIGTERM, as in Spark's Triton guides:
            ``fn(ports, model_path)``, where `ports` are the ports for HTTP, gRPC and metrics; or
            ``fn(ports)`` without `model_path`. The function, and everything that it refers to, is
            sent to a separate process. PyTriton listens on the node's address unless the function
            sets ``http_address`` and ``grpc_address``, and its temporary files are removed with it
            unless the function names a ``workspace``. Triton has no API key.
        model_path: Passed to `fn`; the content of a local file or folder is part of fragment keys.
        python: The Python interpreter with PyTriton, for example in a separate environment, because
            nvidia-pytriton needs numpy below 2. Default: the worker's.
        model: Name of the model in requests. A replica is ready once this model is loaded. Without
            a name, it is ready once Triton answers, which may be before the model is loaded.
        name: Name for people and the command line. Default: from the model or function.
        replicas: Number of replicas, (min, max) depending on the cluster's free resources, or
            `vd.Workers` with the resources that each replica reserves and the names of environment
            variables that are sent to it. There, ``startup_timeout_s`` (1800) limits the time until
            a replica is ready, and ``max_concurrency`` is the number of requests in flight to a
            replica from one worker of `prompt` or `embed`.
        per_node: Number of replicas on each node that has room, instead of `replicas`.
        gpus: GPUs that a replica reserves. Replicas with fractions share a GPU, but nothing
            enforces the fraction: set ``gpu_memory_utilization`` or a similar flag.
        idle_minutes: Minutes that an unused server stays up. Default: the compute resource's.
        liveness_timeout_s: Seconds without a successful health check after which a replica is
            restarted. Default: 60.
        drain_timeout_s: Seconds that a replica has to finish its requests when it is stopped,
            between SIGTERM and SIGKILL. Default: 30.

    Raises:
        DefinitionError: If an argument is invalid.

    Example:
        The environment of `python` needs nvidia-pytriton, the function's imports, the same minor
        version of Python as the workers, and Python's shared library. Install this library with
        `apt-get install libpython3.11` on Debian, or `--enable-shared` with pyenv; conda's and uv's
        Python include it. The workers need a client, here ``tritonclient[grpc]``.

        ```python
        import functools

        import vane_dagster as vd


        def serve_doubler(ports):
            import signal

            import numpy as np
            from pytriton.decorators import batch
            from pytriton.model_config import ModelConfig, Tensor
            from pytriton.triton import Triton, TritonConfig

            @batch
            def double(x):
                return {"y": 2 * x}

            http, grpc, metrics = ports
            with Triton(
                config=TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics)
            ) as triton:
                triton.bind(
                    model_name="doubler",
                    infer_func=double,
                    inputs=[Tensor(name="x", dtype=np.float32, shape=(1,))],
                    outputs=[Tensor(name="y", dtype=np.float32, shape=(1,))],
                    config=ModelConfig(max_batch_size=64),
                )
                signal.signal(signal.SIGTERM, lambda *_: triton.stop())
                triton.serve()


        def make_predict(host_to_url):
            import socket

            import numpy as np
            from tritonclient.grpc import InferenceServerClient, InferInput

            client = InferenceServerClient(host_to_url[socket.gethostname()].removeprefix("grpc://"))

            def predict(x):
                given = InferInput("x", [len(x), 1], "FP32")
                given.set_data_from_numpy(np.asarray(x, np.float32).reshape(-1, 1))
                return client.infer("doubler", [given]).as_numpy("y")[:, 0]

            return predict


        triton = vd.TritonServer(
            serve_doubler, model="doubler", python="/opt/triton/bin/python", per_node=1
        )
        pipeline = vd.Pipeline("numbers", source=vd.parquet("numbers/*.parquet"), id="id")
        pipeline.predict_batch(
            "doubled",
            functools.partial(make_predict, host_to_url=triton.host_to_grpc_url),
            columns=["x"],
            return_type="float",
            batch_size=64,
        )
        ```
    """

    kind = "Triton server"

    @known_keywords("vd.TritonServer", advice=_FIELDS)
    def __init__(
        self,
        fn: Callable[..., Any],
        model_path: str | os.PathLike[str] | LocalFile | None = None,
        *,
        python: str | os.PathLike[str] | None = None,
        model: str = "",
        **options: Unpack[ServerArguments],
    ) -> None:
        where, form = "vd.TritonServer", "fn(ports)" if model_path is None else _WITH_PATH
        called = unwrapped(fn)
        is_later = inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called)
        if is_later or not is_function(called):
            raise DefinitionError(
                f"{where}: fn is {fn!r}; expected a plain function {form}, which serves until "
                "SIGTERM. A model repository is served by vd.Server(['tritonserver', ...])"
            )
        path = () if model_path is None else (_word(where, "model_path", model_path, "a path"),)
        check_call(where, fn, ((), *path), {}, form)
        self._fn = fn
        model = text(where, "model", model, "its name in requests") if model else ""
        loaded = f"models/{urllib.parse.quote(model, safe='')}" if model else "health"
        launch = Launch(
            "",
            (_python(where, python), *_TRITON_RUNNER, *path),
            f"/v2/{loaded}/ready",
            _TRITON_PORTS,
            {**_PYTRITON_ADDRESSES, **(_OWN_ENVIRONMENT if python else {})},
            model=model,
        )
        # The content of a bare word would not count.
        named = [Path(each) if isinstance(each, str) and "/" not in each else each for each in path]
        keyed = {"fn": fn, "path": named, "model": model}
        default = getattr(called, "__name__", "triton")
        super().__init__(model or default, launch, keyed, **options)

    def launch(self) -> Launch:
        """See `ModelServer.launch`."""
        from vane_dagster.fingerprint.portable import portable_payload
        from vane_dagster.servers.triton_runner import stamped

        payload = portable_payload(code_identity(unwrapped(self._fn)).modules, self._fn)
        if payload is None:
            raise DefinitionError(
                f"{self.label}: its function cannot run in a separate process, because it imports "
                "your own code inside of the function, or refers to more than 256 KB of data. "
                "Import your modules at the top of its module, and pass data as model_path"
            )
        return replace(self._launch, payload=stamped(payload))


def _word(where: str, name: str, value: Any, expected: str) -> str | LocalFile:
    """Return a word of a command line: text, also of a path, or a local file."""
    if isinstance(value, LocalFile):
        return value
    return text(where, name, path_text(value), expected)


def _python(where: str, python: Any) -> str:
    return text(where, "python", path_text(python) or "{python}", "an interpreter's path")


def _variables(where: str, given: Any) -> dict[str, str]:
    """Validate environment variables with their values."""
    variables = {
        name: path_text(value) for name, value in mapping(where, "env_vars", given).items()
    }
    for name, value in variables.items():
        if not isinstance(value, str):  # it may be a secret
            kind = type(value).__name__
            raise DefinitionError(f"{where}: env_vars[{name!r}] is a {kind}; expected text")
    return dict(sorted(variables.items()))


def _flags(where: str, flags: Any) -> dict[str, Any]:
    """Validate flags of ``vllm serve``, written with dashes or underscores."""
    given = mapping(where, "flags", flags).items()
    by_name = {name.strip("-").replace("-", "_"): value for name, value in given}
    if own := [name for name in by_name if name in _OWN_FLAGS]:
        raise DefinitionError(
            f"{where}: leave {own[0]!r} out of flags: each replica gets its own address and key, "
            "and clients connect by HTTP"
        )
    return {n: _flag_value(where, n, value) for n, value in by_name.items() if value is not None}


def _flag_value(where: str, name: str, value: Any) -> Any:
    """Return a flag's value as what counts in keys: a bool, or a list of its words.

    A dict stays one, and a path a path, because the content of files that they name counts.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)) and value:
        return [word for each in value for word in _flag_value(where, name, each)]
    if isinstance(value, Mapping):
        try:
            return [json.loads(json.dumps(dict(value), sort_keys=True))]
        except (TypeError, ValueError) as error:
            raise DefinitionError(f"{where}: {name} cannot be written as JSON: {error}") from error
    if not isinstance(value, (str, int, float, os.PathLike, LocalFile)):
        raise DefinitionError(
            f"{where}: {name} is a {type(value).__name__}; expected text, a number, a list or dict"
        )
    return [value if isinstance(value, (os.PathLike, LocalFile)) else str(value)]


def _flag_word(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else path_text(value)
