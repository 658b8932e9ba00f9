"""The process of a server's function: its environment, arguments, signals and outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import cloudpickle

from support.heads import free_port
from vane_dagster.servers import triton_runner
from vane_dagster.servers.triton_runner import stamped

CLOUDPICKLE = str(Path(cloudpickle.__file__).parent)
TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def command(folder: Path, payload: bytes, port: int, *arguments: str) -> list[str]:
    """A command line of the runner, under a Python that has no packages at all (-S)."""
    file = folder / "payload"
    file.write_bytes(payload)
    ports = [str(port), "50001", "50002"]
    return [
        sys.executable, "-S", triton_runner.__file__, CLOUDPICKLE, str(file), *ports, *arguments
    ]  # fmt: skip


def serve(ports, model_path):
    """Serve the content of a file until SIGTERM, as a function for PyTriton does."""
    import http.server
    import importlib.util
    import os
    import pathlib
    import signal
    import tempfile
    import threading

    import cloudpickle

    places = [cloudpickle.__file__, tempfile.gettempdir(), os.environ["PYTRITON_HOME"]]
    # Packages of the worker, and a file beside the runner.
    places += filter(importlib.util.find_spec, ("numpy", "vane_dagster", "launch"))
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
    print(f"serving on {ports} with {places}")
    server.serve_forever()
    server.server_close()
    print("stopped")


def test_a_function_serves_until_sigterm(tmp_path):
    """Only cloudpickle comes from the worker's environment; its files are beside the payload."""
    (tmp_path / "model").write_text("the model")
    port = free_port()
    payload = stamped(cloudpickle.dumps(serve))
    line = command(tmp_path, payload, port, str(tmp_path / "model"))
    with subprocess.Popen(line, **TEXT, cwd="/", env={"PATH": os.environ["PATH"]}) as process:
        # Its output is read while it runs, so it is not held back in a buffer.
        places = [f"{CLOUDPICKLE}/__init__.py", str(tmp_path), str(tmp_path)]
        first = process.stdout.readline()
        expected = f"serving on [{port}, 50001, 50002] with {places}\n"
        assert first == expected, process.stderr.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
            assert answer.read() == b"the model"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(30) == 0, process.stderr.read()
