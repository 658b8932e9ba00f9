"""Declarations of servers: their command lines, their identities, and what is refused."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import vane_dagster as vd
from support.paths import FENCED
from vane_dagster._secrets import masked
from vane_dagster.fingerprint.local_file import found_in
from vane_dagster.pipeline.servers import ModelServer, ServerArguments
from vane_dagster.planning.definition import pool_identity, stage_definition
from vane_dagster.servers.handle import ServerHandle


def pipeline(server: Any) -> vd.Pipeline:
    made = empty()
    made.prompt("answer", "{text}", model=server)
    return made


def empty() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("/none"), id="id")


def definition(docs: vd.Pipeline) -> str:
    return stage_definition(docs, docs["answer"].spec)


def pool(docs: vd.Pipeline) -> str:
    return pool_identity(docs, docs["answer"].spec)


async def serve_async(ports: Any) -> None: ...


def test_flags_of_vllm():
    server = vd.VLLMServer(
        "models/tiny",
        flags={
            "max_model_len": 128,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "chat_template": None,
            "lora_modules": [{"path": "x", "name": "a"}, "b=y"],
            "hf_overrides": {"a": 1},
        },
    )
    words = server.launch().command
    assert words[:4] == ("{python}", "-m", "vllm.entrypoints.openai.api_server", "--model")
    text = " ".join(words)
    assert "--no-enable-prefix-caching --enforce-eager" in text
    assert (
        '--hf-overrides {"a": 1} --lora-modules {"name": "a", "path": "x"} b=y --max-model-len 128'
        in text
    )
    assert "--served-model-name tiny" in text
    assert "chat" not in text
    assert (server.name, server.model) == ("tiny", "tiny")
    assert server.launch().key_env == "VLLM_API_KEY"
    assert server.launch().env == {"VLLM_RPC_BASE_PATH": "{folder}"}, "its sockets are private"
    other = vd.VLLMServer("m", python="/opt/vllm/bin/python").launch()
    assert (other.command[0], other.env["PYTHONPATH"]) == ("/opt/vllm/bin/python", "")


def vllm(*args: Any, **given: Any) -> tuple[Any, ...]:
    return vd.VLLMServer, args, given


def program(command: Any = ("serve", "{port}"), **given: Any) -> tuple[Any, ...]:
    return vd.Server, (command,), given


def triton(*args: Any, **given: Any) -> tuple[Any, ...]:
    return vd.TritonServer, args, given


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (vllm("m", {"port": 8000}), "leave 'port' out of flags: each replica gets"),
        (vllm("m", num_cpus=1), "write replicas=vd.Workers(num_cpus=...)"),
        (vllm("m", max_model_len=8), "write a flag of `vllm serve` as flags=dict(...)"),
        (vllm("m", replicas=vd.Workers(max_batches=1)), "'max_batches' is for"),
        (vllm("m", {"api_key": "sk"}), "its own address and key"),
        (vllm("m", {"hf_overrides": {"a": object()}}), "cannot be written as JSON"),
        (vllm("m", replicas=2, per_node=1), "either replicas or per_node"),
        (vllm("m", env_vars=["A"]), "write replicas=vd.Workers(env_vars=...)"),
        (vllm("/"), "Give the server a name by name="),
        (program(["serve"]), r"has no {port}"),
        (program(env_vars={"A": 1}), "env_vars['A'] is a int"),
        (program(health="health"), "expected a path"),
        (triton(lambda ports: 0, "m"), "cannot be called as fn(ports, model_path): too many"),
        (triton(lambda ports, path: 0), "cannot be called as fn(ports): missing"),
        (triton(serve_async), "expected a plain function fn(ports)"),
    ],
)
def test_wrong_declarations_are_refused_where_they_are_written(declared, words):
    server, args, given = declared
    with pytest.raises(vd.errors.DefinitionError) as raised:
        server(*args, **given)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"flags": {"seed": 1, "dtype": "half"}}, {"flags": {"dtype": "half", "seed": 1}}),
        (
            {"flags": {"hf_overrides": {"a": 1, "b": (2,)}}},
            {"flags": {"hf_overrides": {"b": [2], "a": 1}}},
        ),
        (
            {"replicas": vd.Workers(env_vars=["A", "B"])},
            {"replicas": vd.Workers(env_vars=("B", "A"))},
        ),
        ({"replicas": 1}, {"replicas": vd.Workers(1, num_cpus=0, resources={"a": 0})}),
        ({"flags": {"max_model_len": 8}}, {"flags": {"--max-model-len": 8}}),
    ],
)
def test_declarations_that_are_written_differently_are_the_same_server(one, other):
    first, second = vd.VLLMServer("m", **one), vd.VLLMServer("m", **other)
    assert (first.key, first.identity()) == (second.key, second.identity())
    assert definition(pipeline(first)) == definition(pipeline(second))


@pytest.mark.parametrize(
    "changed",
    [
        {"env_vars": {"MODE": "b"}},
        {"env_vars": None, "replicas": vd.Workers(env_vars=["MODE"])},
        {"api_key_env": "KEY"},
        {"model": "b"},
        {"health": "/v1/models"},
        {"replicas": vd.Workers(startup_timeout_s=1)},
        {"gpus": 0.5},
        {"version": "b"},
    ],
)
@pytest.mark.parametrize("version", [None, "a"])
def test_declarations_that_differ_are_different_servers(changed, version):
    given = {"model": "a", "env_vars": {"MODE": "a"}, "version": version, "name": "served"}
    one = vd.Server(["serve", "{port}"], **given)
    other = vd.Server(["serve", "{port}"], **{**given, **changed})
    assert one.identity() != other.identity()
    assert one.key != other.key


def test_a_file_in_a_flag_counts_wherever_it_is_named(tmp_path: Path):
    (tmp_path / "draft").mkdir()
    weights = tmp_path / "draft" / "weights.bin"

    def keyed(content: str, **flags: Any) -> str:
        weights.write_text(content)
        return definition(pipeline(vd.VLLMServer("m", flags)))

    for flags in (
        {"tokenizer": tmp_path / "draft"},
        {"lora_modules": [tmp_path / "draft"]},
        {"speculative_config": {"model": str(tmp_path / "draft")}},
    ):
        assert keyed("1", **flags) != keyed("22", **flags), flags


def test_a_flag_that_changes_answers_counts_in_keys_and_another_does_not():
    declared = pipeline(vd.VLLMServer("m", {"max_model_len": 128}))
    longer = pipeline(vd.VLLMServer("m", {"max_model_len": 256}))
    fuller = pipeline(vd.VLLMServer("m", {"max_model_len": 128, "gpu_memory_utilization": 0.5}))
    more = pipeline(vd.VLLMServer("m", {"max_model_len": 128}, replicas=3, idle_minutes=1))
    rotated = pipeline(vd.VLLMServer("m", {"max_model_len": 128, "hf_token": "hf_planted_1"}))
    dummy = pipeline(vd.VLLMServer("m", {"max_model_len": 128, "load_format": "dummy"}))
    assert definition(declared) == definition(fuller) == definition(more) == definition(rotated)
    assert definition(dummy) != definition(declared), "its weights are random"
    assert definition(longer) != definition(declared)
    assert len({pool(declared), pool(longer), pool(fuller)}) == 3, "each is a server of its own"


@pytest.mark.parametrize(
    "make",
    [
        lambda: vd.Server(["tritonserver", "--port", "{port}", Path("models")], model="m"),
        lambda: vd.TritonServer(print, "models", model="m"),
        lambda: vd.TritonServer(print, "~/models", model="m"),
        lambda: vd.VLLMServer(Path("models")),
        lambda: vd.Server(["serve", "{port}", Path("models")], model="m"),
    ],
)
def test_a_path_counts_whatever_it_is_called(make, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "doubler").mkdir(parents=True)
    code = tmp_path / "models" / "doubler" / "model.py"
    code.write_text("1")
    before = (make().identity(), definition(pipeline(make())))
    code.write_text("22")
    after = (make().identity(), definition(pipeline(make())))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_version_replaces_the_command_of_a_server_and_the_files_that_it_names(tmp_path: Path):
    log = tmp_path / "log"

    def identity(version: str | None, flag: str = "--a") -> tuple[str, str]:
        command = ["serve", "{port}", "--log", log, flag]
        server = vd.Server(command, model="m", version=version)
        return server.identity(), definition(pipeline(server))

    log.write_text("")
    (old, key), versioned = identity(None), identity("1")
    assert key != identity(None, "--b")[1]
    assert versioned[1] == identity("1", "--b")[1] != identity("2", "--b")[1]
    log.write_text("a line")
    assert identity(None)[0] != old
    assert versioned == identity("1")
    assert versioned[0] != identity("2")[0]


class Ask:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __call__(self, text: str) -> str:
        return text


def ask(text: str, llm: Any) -> str:
    return text


@vd.cls
class Decorated(Ask):
    """The same, declared with its server."""


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (Ask, {"fn_constructor_kwargs": {"llm": vd.VLLMServer("m")}}),
        (ask, {"fn_kwargs": {"llm": vd.VLLMServer("m")}}),
        (ask, {"fn_kwargs": {"llm": {"a": [vd.VLLMServer("m")]}}}),
        (Decorated(vd.VLLMServer("m")), {}),
    ],
)
def test_a_server_is_an_argument_of_the_class_or_function(fn, options):
    docs = empty()
    docs.map("asked", fn, schema="VARCHAR", **options)
    assert set(docs["asked"].spec.udf.servers) == {vd.VLLMServer("m").key}


@dataclass
class Settings:
    llm: Any


def closed_over(server: vd.VLLMServer) -> Any:
    def asking(text: str) -> str:
        return str(server.url) + text

    return asking


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (closed_over(vd.VLLMServer("m")), {}),
        (ask, {"fn_kwargs": {"llm": Settings(vd.VLLMServer("m"))}}),
    ],
)
def test_a_server_that_the_code_refers_to_is_started_and_travels_as_a_handle(fn, options):
    docs = empty()
    docs.map("asked", fn, schema="VARCHAR", **options)
    udf = docs["asked"].spec.udf
    assert set(udf.servers) == {vd.VLLMServer("m").key}
    sent = cloudpickle.loads(cloudpickle.dumps((udf.target, udf.kwargs)))
    assert [type(each) for each in found_in(sent, ServerHandle)] == [ServerHandle]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"provider": "vllm"}, "VllmProvider does not call a server"),
        ({"provider": "transformers"}, "TransformersProvider does not call a server"),
        ({"options": {"base_url": "http://x"}}, "have base_url, but the server's address"),
        ({"options": {"api_key_env": "KEY"}}, "have api_key_env, but the server's key"),
    ],
)
def test_what_contradicts_the_server_of_a_prompt_is_refused(given, words):
    docs = empty()
    model = vd.Model(vd.VLLMServer("m"), options=given.get("options", {}))
    with pytest.raises(vd.errors.DefinitionError, match=words):
        docs.prompt("a", "{text}", model=model, provider=given.get("provider"))


def test_a_server_may_run_a_model_of_another_name():
    docs = empty()
    server = vd.VLLMServer("m", {"enable_lora": True})
    stage = docs.prompt("a", "{text}", model=vd.Model("adapter", options={"server": server}))
    assert stage.spec.model.name == "adapter"
    assert list(stage.spec.udf.servers.values()) == [server]
    with pytest.raises(
        vd.errors.DefinitionError, match="SentenceTransformersProvider does not call a server"
    ):
        docs.embed("b", "text", provider="sentence_transformers", model=vd.VLLMServer("m"))


def test_two_servers_of_a_stage_are_told_apart():
    def serve(ports: Any, *, n: int = 1) -> int:
        return n

    one, other = vd.TritonServer(serve), vd.TritonServer(functools.partial(serve, n=2))
    docs = empty()
    with pytest.raises(
        vd.errors.DefinitionError, match="two servers are named 'serve' and differ only in code"
    ):
        docs.map("asked", ask_both, fn_kwargs={"llm": one, "other": other})
    named = vd.TritonServer(functools.partial(serve, n=2), name="two")
    docs.map("named", ask_both, fn_kwargs={"llm": one, "other": named})
    assert set(docs["named"].spec.udf.servers) == {one.key, named.key}


def ask_both(text: str, llm: Any, other: Any) -> str:
    return text


def test_triton_gets_a_function_by_value():
    def serve(ports: Any, model_path: Any) -> None: ...

    server = vd.TritonServer(serve, "models/x", python="/opt/triton/bin/python")
    launch = server.launch()
    assert launch.payload
    assert launch.command[0] == "/opt/triton/bin/python"
    assert launch.ports == ("port", "grpc_port", "metrics_port")
    assert server.name == "serve"
    assert (launch.health, launch.model) == ("/v2/health/ready", "")
    # It imports no packages of the worker's, and does not listen on every address.
    assert launch.env["PYTHONPATH"] == ""
    assert launch.env["PYTRITON_TRITON_CONFIG_GRPC_ADDRESS"] == "{host}"


def test_a_named_model_of_triton_is_part_of_its_readiness_and_of_keys():
    named = vd.TritonServer(print, model="a b")
    launch = named.launch()
    assert (launch.health, launch.model) == ("/v2/models/a%20b/ready", "a b")
    assert "PYTHONPATH" not in launch.env
    assert named.keyed != vd.TritonServer(print, model="b").keyed


def test_secrets_of_a_command_are_masked_once_it_is_declared():
    words = ["--api-key", "sk-planted-1", "--hub-token=hf-planted-2", "--api-key-env", "PLAIN_NAME"]
    vd.Server(["serve", "{port}", *words], env_vars={"MY_PASSWORD": "planted-3"})
    shown = masked("sk-planted-1 hf-planted-2 planted-3 PLAIN_NAME")
    assert shown == "*** *** *** PLAIN_NAME"


@pytest.mark.parametrize("kind", [vd.Server, vd.VLLMServer, vd.TritonServer])
def test_docstrings_list_every_option(kind: type[ModelServer]) -> None:
    listed = set(re.findall(r"^ +(\w+): ", kind.__doc__ or "", re.MULTILINE))
    parameters = {*inspect.signature(kind).parameters, *ServerArguments.__annotations__}
    assert parameters - {"options"} <= listed


@pytest.mark.parametrize("kind", [vd.Server, vd.TritonServer])
def test_an_example_of_a_docstring_declares_a_server_and_a_stage(kind: type[ModelServer]) -> None:
    ((_, _, code),) = FENCED.findall(kind.__doc__ or "")
    found: dict[str, Any] = {}
    exec(compile(textwrap.dedent(code), str(kind), "exec"), found)
    (stage,) = found["pipeline"]
    assert set(stage.spec.udf.servers) == {found["triton"].key}
    assert found["triton"].identity()
