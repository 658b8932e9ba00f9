"""Declarations of model servers: vLLM, Triton, and any other command."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vane_dagster._arguments import (
    list_of_names,
    mapping,
    parse_concurrency,
    path_text,
    positive,
    seconds,
)
from vane_dagster._keywords import similar
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.local_file import LocalFile
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.pipeline.options import STARTUP_SECONDS, Resources
from vane_dagster.providers.vllm_arguments import misspelled
from vane_dagster.providers.vllm_engine import OPERATIONAL_ARGUMENTS
from vane_dagster.servers.handle import HostUrls, ServerHandle
from vane_dagster.servers.launch import Launch
from vane_dagster.servers.process import flags
from vane_dagster.servers.triton_runner import stamped
from vane_dagster.types.callables import signature_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FLAG = re.compile(r"[a-z][a-z0-9_]*")
_OWN_FLAGS = {
    "api_key": "each replica gets a key of its own",
    "host": "the address is chosen on the replica's node",
    "num_gpus": "gpus=... reserves GPUs for a replica",
    "port": "a free port is chosen on the replica's node",
    "ssl_certfile": "clients connect by HTTP",
    "ssl_keyfile": "clients connect by HTTP",
    "uds": "clients connect to a port",
    "version": "it makes vLLM print its version and exit",
}
_OPERATIONAL_FLAGS = frozenset(
    {
        *OPERATIONAL_ARGUMENTS,
        "allow_credentials",
        "allowed_headers",
        "allowed_methods",
        "allowed_origins",
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
_VLLM_GAUGES = ("/metrics", "vllm:num_requests_running", "vllm:num_requests_waiting")
_OWN_ENVIRONMENT = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""For an interpreter of another environment: it must not import the worker's packages."""
_MISSPELLED = 0.8
"""Similarity to an option of ours above which a flag is a misspelled option: no flag of vLLM is."""
_OF_HANDLES = ("url", "grpc_url", "api_key", "headers", "endpoint", "request")
_TRITON_PORTS = ("port", "grpc_port", "metrics_port")
_PYTRITON_ADDRESSES = {
    f"PYTRITON_TRITON_CONFIG_{protocol}_ADDRESS": "{host}" for protocol in ("HTTP", "GRPC")
}
"""Where PyTriton listens unless its function says otherwise; its default is every address."""


@dataclass(frozen=True)
class ServerOptions:
    """The options that all kinds of servers have.

    Attributes:
        name: Name for people and the command line. Default: from the model or the command.
        replicas: Minimum and maximum number of replicas, depending on the cluster's free resources.
            A number is both.
        per_node: Replicas on each node that can hold one, in place of `replicas`.
        num_cpus: CPUs that a replica reserves.
        gpus: GPUs that a replica reserves; fractions share one.
        memory: Bytes of memory that a replica reserves.
        accelerator_type: The GPU type, as Ray names it.
        resources: Custom cluster resources that a replica reserves.
        env_vars: Names of environment variables of the driver that are sent to the servers, and
            never stored or logged.
        startup_timeout_s: Seconds until a replica must be ready.
        liveness_timeout_s: Seconds without a successful health check after which a replica is
            restarted.
        drain_timeout_s: Seconds that a replica has to finish its requests when it is stopped.
        idle_minutes: Minutes that the server stays up when nothing uses it. Default: those of the
            compute resource.
        max_concurrency: Requests in flight to one replica from one worker, of the stages that send
            them for you, such as `prompt`.
        max_rss: Bytes of private memory after which a replica is restarted, for servers that leak.
    """

    name: str | None = None
    replicas: tuple[int, int] = (1, 1)
    per_node: int | None = None
    num_cpus: float = 0
    gpus: float = 0
    memory: int = 0
    accelerator_type: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    env_vars: Sequence[str] = ()
    startup_timeout_s: float = STARTUP_SECONDS
    liveness_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    idle_minutes: float | None = None
    max_concurrency: int | None = None
    max_rss: int | None = None


_OPTIONS = tuple(ServerOptions.__dataclass_fields__)


class ModelServer:
    """A declared server. Stages and pipelines that declare it equally share its replicas.

    Attributes:
        name: Name for people and the command line.
        options: The options that all servers have.
        keyed: What counts in fragment keys, because it may change answers.
        key: Identifies the server to workers.
    """

    kind = "server"

    def __init__(
        self,
        default_name: str,
        launch: Launch,
        keyed: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        where = f"vd.{type(self).__name__}"
        keep_arguments(keyed, dict(launch.env), *flags([str(word) for word in launch.command]))
        own = _options(where, options, inspect.signature(type(self)).parameters)
        self.name = own.name or _NAME_CHARACTERS.sub("-", default_name).strip("-.")
        if not _NAME.fullmatch(self.name):
            raise DefinitionError(
                f"{where}: name is {self.name!r}; expected letters, digits, '.', '_' and '-'. Give "
                "the server a name by name="
            )
        self.options = replace(own, name=self.name)
        self.keyed = {"kind": self.kind, **keyed}
        self._launch = replace(
            launch,
            label=f"{self.kind} {self.name}",
            startup_timeout_s=self.options.startup_timeout_s,
            liveness_timeout_s=self.options.liveness_timeout_s,
            drain_timeout_s=self.options.drain_timeout_s,
            max_rss=self.options.max_rss,
        )
        # Plain text alone: no file is read, because workers import declarations too.
        started = (repr(self._launch), sorted(launch.env.items()), self.keyed.get("version"))
        self.key = digest(*started, repr(self.options))

    def __repr__(self) -> str:
        return f"vd.{type(self).__name__}(name={self.name!r})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"vd.{type(self).__name__} has no attribute {name!r}"
            if name in _OF_HANDLES:
                problem += (
                    ": it is only declared. A function gets the server with its address by "
                    "fn_kwargs or fn_constructor_kwargs; `vane-dagster servers endpoint` prints "
                    "the address of one that runs"
                )
            raise AttributeError(problem)

    @property
    def handle(self) -> ServerHandle:
        """The server as an argument of a function or class."""
        return ServerHandle(self.key, self.keyed, self)

    @property
    def host_to_http_url(self) -> HostUrls:
        """URLs for HTTP by host name: ``http://host:port``; see `ServerHandle`."""
        return HostUrls(self.handle, "http")

    @property
    def host_to_grpc_url(self) -> HostUrls:
        """URLs for gRPC by host name: ``grpc://host:port``; see `ServerHandle`."""
        return HostUrls(self.handle, "grpc")

    @property
    def model(self) -> str:
        """Name of the model in requests; empty if the server has none."""
        return self._launch.model

    @property
    def command(self) -> tuple[Any, ...]:
        """The command line, with placeholders."""
        return self._launch.command

    @property
    def label(self) -> str:
        """Kind and name, for messages."""
        return self._launch.label

    @property
    def reserved(self) -> Resources:
        """What one replica reserves."""
        own = self.options
        return Resources(own.num_cpus, own.gpus, own.memory, own.accelerator_type, own.resources)

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
        launch = self._launch
        own = {
            "command": launch.command,
            "env_vars": dict(sorted(launch.env.items())),
            "health": launch.health,
            "api_key_env": launch.key_env,
            "model": launch.model,
            "max_rss": launch.max_rss,
        }
        files = LocalFiles(read="version" not in self.keyed)
        started = [value_digest(each, self.label, files) for each in (self.keyed, own)]
        reserved = sorted(self.reserved.bundle().items())
        return digest("server", *started, reserved, self.options.env_vars)[:16]


_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def servers_by_key(servers: Iterable[ModelServer]) -> dict[str, ModelServer]:
    """Return servers by their key, those that are equal once.

    Raises:
        DefinitionError: If two that differ have the same key.
    """
    found: dict[str, ModelServer] = {}
    for server in servers:
        other = found.setdefault(server.key, server)
        if other is not server and other.identity() != server.identity():
            raise DefinitionError(
                f"two servers are named {server.name!r} and differ only in code or files; give "
                "each a name of its own"
            )
    return found


class Server(ModelServer):
    """Any server with a health endpoint, started by a command on each node that needs one.

    Args:
        command: The command line. ``{port}`` is replaced by a free port, ``{host}`` by the address
            to bind to, ``{grpc_port}`` and ``{metrics_port}`` by further free ports, and
            ``{python}`` by the worker's interpreter.
        health: Path that answers with status 200 to 299 once the server is ready.
        model: Name of the model in requests, if the server has one.
        env_vars: Environment variables of the server, by name; or the names of variables of the
            driver that it gets. Placeholders are replaced as in `command`.
        api_key_env: Name of the variable in which the server expects its API key, a random one for
            each replica. Default: the server has no key.
        version: Replaces the command in fragment keys, and the content of files that the command
            names, which otherwise counts: needed if the server writes to one of them, and if code
            that the command does not name decides its answers.
        **options: See `ServerOptions`.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str] | LocalFile],
        *,
        health: str = "/health",
        model: str = "",
        env_vars: Mapping[str, str] | Sequence[str] = (),
        api_key_env: str | None = None,
        version: str | None = None,
        **options: Any,
    ) -> None:
        where = "vd.Server"
        if not isinstance(command, (list, tuple)) or not command:
            found = "empty" if isinstance(command, (list, tuple)) else f"a {type(command).__name__}"
            raise DefinitionError(
                f"{where}: command is {found}; expected a list of the program and its arguments"
            )
        words: tuple[Any, ...] = tuple(
            part if isinstance(part, LocalFile) else path_text(part) for part in command
        )
        if wrong := [word for word in words if not isinstance(word, (str, LocalFile))]:
            raise DefinitionError(f"{where}: command has {wrong[0]!r}; expected text")
        text = " ".join(map(str, words))
        given = _variables(where, env_vars) if isinstance(env_vars, Mapping) else {}
        if "{port}" not in text and "{port}" not in " ".join(given.values()):
            raise DefinitionError(
                f"{where}: command has no {{port}}, which is replaced by a free port; write for "
                'example "--port", "{port}"'
            )
        if not isinstance(env_vars, Mapping):
            options["env_vars"] = env_vars
        used = [text, *given.values()]
        ports = [name for name in _TRITON_PORTS[1:] if any(f"{{{name}}}" in one for one in used)]
        program = str(words[0])
        launch = Launch(
            "",
            words,
            _path(where, health),
            ("port", *ports),
            given,
            _text(where, "api_key_env", api_key_env, "its name") if api_key_env else None,
            _text(where, "model", model or "", "its name in requests"),
        )
        keyed: dict[str, Any] = {
            "command": tuple(command),
            "env_vars": given,
            "model": launch.model,
        }
        if version is not None:
            keyed = {"version": str(version)}
        super().__init__(model or os.path.basename(program), launch, keyed, options)


class VLLMServer(ModelServer):
    """vLLM's server with OpenAI's API.

    Args:
        model: A model's name, the path of its folder, or `vd.local_file` of it.
        python: The Python interpreter with vLLM. Default: the worker's.
        **options: See `ServerOptions`. All others are flags of ``vllm serve``:
            ``max_model_len=4096`` becomes ``--max-model-len 4096``, True becomes ``--flag``, False
            ``--no-flag``, a list several values and a dict JSON. Flags that change no answers, such
            as `gpu_memory_utilization`, are no part of fragment keys.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    kind = "vLLM server"

    def __init__(
        self,
        model: str | os.PathLike[str] | LocalFile,
        *,
        python: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        where = "vd.VLLMServer"
        given = model if isinstance(model, LocalFile) else path_text(model)
        if not given or not isinstance(given, (str, LocalFile)):
            raise DefinitionError(f"{where}: model is {model!r}; expected a name or path")
        given_flags = {
            name: value
            for name, value in options.items()
            if name not in _OPTIONS and value is not None
        }
        common = {name: value for name, value in options.items() if name in _OPTIONS}
        for name in given_flags:
            if name in _OWN_FLAGS:
                raise DefinitionError(f"{where}: leave {name!r} out: {_OWN_FLAGS[name]}")
            if meant := difflib.get_close_matches(name, _OPTIONS, 1, _MISSPELLED):
                raise DefinitionError(
                    f"{where}: {name!r} is no flag of `vllm serve`. Did you mean {meant[0]!r}?"
                )
            if not _FLAG.fullmatch(name):
                raise DefinitionError(
                    f"{where}: {name!r} is no flag of `vllm serve`; write max_model_len for "
                    "--max-model-len"
                )
            own = ("model", "python", *_OPTIONS)
            if correction := misspelled(name, own, is_elsewhere=python is not None):
                raise DefinitionError(f"{where}: {name!r} is no flag of `vllm serve`. {correction}")
        short = os.path.basename(given.path if isinstance(given, LocalFile) else given.rstrip("/"))
        served = given_flags.get("served_model_name", short)
        served = [served] if isinstance(served, str) else served
        if not isinstance(served, (list, tuple)) or not served:
            raise DefinitionError(f"{where}: served_model_name is {served!r}; expected a name")
        given_flags["served_model_name"] = served
        words: list[Any] = ["--model", given, "--host", "{host}", "--port", "{port}"]
        for name, value in sorted(given_flags.items()):
            words += _flag(where, name, value)
        launch = Launch(
            "",
            (_python(where, python), "-m", "vllm.entrypoints.openai.api_server", *words),
            env={**_PRIVATE_SOCKETS, **(_OWN_ENVIRONMENT if python else {})},
            key_env="VLLM_API_KEY",
            model=_text(where, "served_model_name", served[0], "a name"),
            metrics=_VLLM_GAUGES,
        )
        counted = sorted(set(given_flags) - _OPERATIONAL_FLAGS)
        keyed = {"model": model, "flags": {name: _keyed(given_flags[name]) for name in counted}}
        super().__init__(short, launch, keyed, common)


class TritonServer(ModelServer):
    """NVIDIA's Triton: with a function that serves a model by PyTriton, or a model repository.

    Args:
        fn: Starts Triton and serves until SIGTERM: ``fn(ports, model_path)``, where `ports` are
            those for HTTP, gRPC and metrics; ``fn(ports)`` without `model_path`. It is the contract
            of Spark's Triton guides. The function travels with all that it refers to, into a
            process of its own.
        model_path: Passed to `fn`; the content of a local file or folder counts in fragment keys.
        model_repository: A folder of models, served by ``tritonserver``; in place of `fn`.
        tritonserver: The program for `model_repository`. Default: the one on the PATH.
        python: The Python interpreter with PyTriton, which may be of an environment of its own,
            since nvidia-pytriton needs numpy below 2. Default: the worker's.
        model: Name of the model in requests. A replica is ready once it is loaded; without a name,
            once Triton answers, which PyTriton lets it do before.
        **options: See `ServerOptions`.

    Raises:
        DefinitionError: If an argument is invalid.
    """

    kind = "Triton server"

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        model_path: str | os.PathLike[str] | LocalFile | None = None,
        *,
        model_repository: str | os.PathLike[str] | LocalFile | None = None,
        tritonserver: str | os.PathLike[str] = "tritonserver",
        python: str | os.PathLike[str] | None = None,
        model: str = "",
        **options: Any,
    ) -> None:
        where = "vd.TritonServer"
        if (fn is None) == (model_repository is None):
            raise DefinitionError(f"{where}: expected either fn or model_repository")
        if fn is None and not (model_path is None and python is None):
            raise DefinitionError(
                f"{where}: model_path and python are for a function; tritonserver serves "
                "model_repository by itself. Leave them out"
            )
        path = _location(where, "model_path", model_path)
        folder = _location(where, "model_repository", model_repository)
        if fn is not None:
            _check_function(where, fn, 1 if path is None else 2)
            command: tuple[Any, ...] = (
                _python(where, python), "{triton_runner}", "{cloudpickle}", "{payload}",
                "{port}", "{grpc_port}", "{metrics_port}", *(() if path is None else (path,)),
            )  # fmt: skip
        else:
            program = _text(where, "tritonserver", path_text(tritonserver), "the program's path")
            command = (
                program, "--model-repository", folder, "--http-address", "{host}",
                "--http-port", "{port}", "--grpc-address", "{host}", "--grpc-port", "{grpc_port}",
                "--metrics-port", "{metrics_port}",
            )  # fmt: skip
        self._fn = fn
        model = _text(where, "model", model or "", "its name in requests")
        loaded = f"models/{urllib.parse.quote(model, safe='')}" if model else "health"
        env = {**_PYTRITON_ADDRESSES, **_OWN_ENVIRONMENT} if python else _PYTRITON_ADDRESSES
        launch = Launch("", command, f"/v2/{loaded}/ready", _TRITON_PORTS, env, model=model)
        called = fn.func if isinstance(fn, functools.partial) else fn
        default = getattr(called, "__name__", "triton") if fn is not None else _last(folder)
        named: Any = folder if fn is None else path
        if isinstance(named, str) and "/" not in named:
            named = Path(named)  # the content of a bare word would not count
        served = {"fn": fn, "path": named}
        super().__init__(model or default, launch, {**served, "model": model}, options)

    def launch(self) -> Launch:
        """See `ModelServer.launch`."""
        if self._fn is None:
            return self._launch
        called = self._fn.func if isinstance(self._fn, functools.partial) else self._fn
        payload = portable_payload(code_identity(called).modules, self._fn)
        if payload is None:
            raise DefinitionError(
                f"{self.label}: its function cannot run in a process of its own, because code of "
                "yours is imported inside of it, or it refers to more than 256 KB of data. Import "
                "your modules at the top of its module, and pass data as model_path"
            )
        return replace(self._launch, payload=stamped(payload))


def _check_function(where: str, fn: Any, count: int) -> None:
    """Refuse what is no function of `count` positional arguments, as far as is known."""
    form = "fn(ports)" if count == 1 else "fn(ports, model_path)"
    called = fn.func if isinstance(fn, functools.partial) else fn
    of = called.__self__ if inspect.ismethod(called) else called
    if not (inspect.isfunction(of) or inspect.isbuiltin(of) or inspect.isclass(of)):
        raise DefinitionError(f"{where}: fn is {fn!r}; expected a function {form}")
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
        raise DefinitionError(
            f"{where}: fn is {fn!r}, whose call only makes a coroutine or generator; expected a "
            f"plain function {form}, which serves until SIGTERM"
        )
    signature = signature_of(fn)
    try:
        if signature is not None:
            signature.bind(*range(count))
    except TypeError as error:
        raise DefinitionError(
            f"{where}: fn is {fn!r}, which cannot be called as {form}: {error}"
        ) from None


def _last(folder: Any) -> str:
    return os.path.basename(folder.path if isinstance(folder, LocalFile) else folder.rstrip("/"))


def _text(where: str, name: str, value: Any, expected: str) -> str:
    if not isinstance(value, str):
        raise DefinitionError(f"{where}: {name} is {value!r}; expected {expected}")
    return value


def _path(where: str, health: Any) -> str:
    if not isinstance(health, str) or not health.startswith("/"):
        raise DefinitionError(f"{where}: health is {health!r}; expected a path, as '/health'")
    return health


def _python(where: str, python: Any) -> str:
    return _text(where, "python", path_text(python) or "{python}", "an interpreter's path")


def _location(where: str, name: str, value: Any) -> str | LocalFile | None:
    """Return a path as text, or the local file."""
    if value is None or isinstance(value, LocalFile):
        return value
    return _text(where, name, path_text(value), "a path")


def _variables(where: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Validate environment variables with their values."""
    found = {name: path_text(value) for name, value in mapping(where, "env_vars", given).items()}
    for name, value in found.items():
        if not isinstance(value, str):  # it may be a secret
            kind = type(value).__name__
            raise DefinitionError(f"{where}: env_vars[{name!r}] is a {kind}; expected text")
    return dict(sorted(found.items()))


def _flag(where: str, name: str, value: Any) -> list[Any]:
    """Return a keyword argument as words of a command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [flag, *(_word(where, name, each) for each in values)]


def _word(where: str, name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        try:
            return json.dumps(dict(value), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise DefinitionError(f"{where}: {name} cannot be written as JSON: {error}") from error
    if isinstance(value, LocalFile):
        return value
    if not isinstance(value, (str, int, float, os.PathLike)):
        raise DefinitionError(
            f"{where}: {name} is a {type(value).__name__}; expected text, a number, a list or dict"
        )
    return str(path_text(value))


def _keyed(value: Any) -> list[Any]:
    """Return a flag's value as what counts in keys: the same for values of the same words.

    Paths in it are left as they are: their content counts.
    """
    if isinstance(value, (list, tuple)):
        return [word for each in value for word in _keyed(each)]
    if isinstance(value, Mapping):
        return [json.loads(json.dumps(dict(value), sort_keys=True))]
    return [value if isinstance(value, (bool, os.PathLike)) else str(value)]


def _options(where: str, given: Mapping[str, Any], taken: Iterable[str]) -> ServerOptions:
    """Validate the options that all servers have; `taken` are the server's own arguments."""
    for name in given:
        if name not in _OPTIONS:
            hint = similar(name, [*_OPTIONS, *taken]) or f"Its options are {names(_OPTIONS, 50)}"
            raise DefinitionError(f"{where}: unknown argument {name!r}. {hint}")
    found = ServerOptions(**{name: value for name, value in given.items() if value is not None})
    if found.name is not None:
        _text(where, "name", found.name, "text")
    if found.per_node is not None and given.get("replicas") is not None:
        raise DefinitionError(f"{where}: expected either replicas or per_node")
    for name in ("per_node", "max_concurrency", "max_rss"):
        positive(where, name, getattr(found, name))
    for name in ("startup_timeout_s", "liveness_timeout_s", "drain_timeout_s"):
        seconds(where, name, getattr(found, name))
    idle = found.idle_minutes
    if idle is not None and (
        isinstance(idle, bool) or not isinstance(idle, (int, float)) or not idle >= 0
    ):
        raise DefinitionError(f"{where}: idle_minutes is {idle!r}; expected a number from 0 up")
    if isinstance(found.env_vars, Mapping):
        raise DefinitionError(
            f"{where}: env_vars is a mapping; expected a list of names of the driver's variables, "
            "whose values are sent"
        )
    forwarded = list_of_names(where, "env_vars", found.env_vars) or ()
    replicas = parse_concurrency(where, found.replicas, "replicas", "replicas") or (1, 1)
    custom = mapping(where, "resources", found.resources)
    Resources(found.num_cpus, found.gpus, found.memory, found.accelerator_type, custom).validate(
        where
    )
    custom = dict(sorted(custom.items()))
    names_sent = tuple(sorted(set(forwarded)))
    return replace(found, replicas=replicas, env_vars=names_sent, resources=custom)


def parse_servers(where: str, servers: Any) -> dict[str, ServerHandle]:
    """Validate the argument `servers` of a stage, and return the handles to pass.

    Args:
        where: The stage, for messages.
        servers: The argument.

    Raises:
        DefinitionError: If it is not a dict of names and servers.
    """
    found = mapping(where, "servers", servers)
    for name, server in found.items():
        if not isinstance(server, ModelServer):
            raise DefinitionError(
                f"{where}: servers[{name!r}] is {server!r}; expected a server, as vd.VLLMServer"
            )
    return {name: server.handle for name, server in found.items()}
