"""The process of a server's function: its environment, arguments, signals and outcome."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from vane_dagster.servers import triton_runner
from vane_dagster.servers.triton_runner import stamped

CLOUDPICKLE = str(Path(cloudpickle.__file__).parent)
TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def command(folder: Path, payload: bytes, port: int = 0, *arguments: str) -> list[str]:
    """A command line of the runner, under a Python that has no packages at all (-S)."""
    file = folder / "payload"
    file.write_bytes(payload)
    ports = [str(port), "50001", "50002"]
    return [
        sys.executable, "-S", triton_runner.__file__, CLOUDPICKLE, str(file), *ports, *arguments
    ]  # fmt: skip


def run(folder: Path, fn: Callable[..., Any], *arguments: str, **given: Any) -> Any:
    """The ended process of a function that ends by itself."""
    line = command(folder, stamped(cloudpickle.dumps(fn)), 0, *arguments)
    return subprocess.run(line, **TEXT, timeout=60, check=False, **given)


def serve(ports, model_path):
    """Serve the content of a file until SIGTERM, as a function for PyTriton does."""
    import http.server
    import pathlib
    import signal
    import threading

    model = pathlib.Path(model_path).read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(model)

    server = http.server.HTTPServer(("127.0.0.1", ports[0]), Handler)

    def stop(signum, frame):
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    print(f"serving on {ports}")
    server.serve_forever()
    server.server_close()
    print("stopped")


def test_a_function_serves_until_sigterm(tmp_path):
    (tmp_path / "model").write_text("the model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    payload = stamped(cloudpickle.dumps(serve))
    line = command(tmp_path, payload, port, str(tmp_path / "model"))
    with subprocess.Popen(line, **TEXT) as process:
        # Its output is read while it runs, so it is not held back in a buffer.
        first = process.stdout.readline()
        assert first == f"serving on [{port}, 50001, 50002]\n", process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
            assert answer.read() == b"the model"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(30) == 0, process.stderr.read()


def test_a_function_without_a_model_path_and_its_temporary_files(tmp_path):
    def makes(*given):
        import os
        import tempfile

        print(given)
        print(tempfile.gettempdir(), os.environ["PYTRITON_HOME"])

    first, second = run(tmp_path, makes).stdout.splitlines()
    assert first == "([0, 50001, 50002],)"
    assert second.split() == [str(tmp_path)] * 2, "in the folder of the payload"


def test_only_cloudpickle_comes_from_the_workers_environment(tmp_path):
    def imports(ports):
        import importlib.util

        import cloudpickle

        print(cloudpickle.__file__)
        # Packages of the worker, and files beside the runner.
        for name in ("numpy", "vane_dagster", "launch"):
            print(name, importlib.util.find_spec(name))

    ended = run(tmp_path, imports, cwd="/", env={"PATH": os.environ["PATH"]})

    found = f"{CLOUDPICKLE}/__init__.py\nnumpy None\nvane_dagster None\nlaunch None\n"
    assert ended.stdout == found, ended.stderr


def test_a_missing_package_is_named_with_the_environment(tmp_path):
    def serves(ports):
        import pytriton_of_nobody  # noqa: F401  # its absence is tested

    ended = run(tmp_path, serves)

    assert ended.returncode == 1
    assert "in serves" in ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"No module named 'pytriton_of_nobody'. Install it in the environment of {sys.executable}, "
        "where the server runs, or name the interpreter of another one by TritonServer(python=...)"
    )


def test_another_version_of_python_is_refused(tmp_path):
    ended = subprocess.run(command(tmp_path, b"3.7\n\x80"), **TEXT, timeout=60, check=False)

    own = "{}.{}".format(*sys.version_info[:2])
    assert ended.returncode == 1
    assert "was pickled by Python 3.7" in ended.stderr
    assert f"{sys.executable} is Python {own}." in ended.stderr
    assert "an environment with Python 3.7" in ended.stderr
