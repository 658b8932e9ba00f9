"""A Kubernetes API server with KubeRay's custom resources, all of them on one real head.

It keeps what it is sent, and has the status of an operator whose clusters are ready at once.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from dagster_ray import Lifecycle, RayResource
from dagster_ray.kuberay import KubeRayCluster, KubeRayInteractiveJob
from dagster_ray.kuberay.client import RayClusterClient, RayJobClient
from dagster_ray.kuberay.configs import ClusterSharing, RayClusterConfig
from dagster_ray.kuberay.resources.rayjob import InteractiveRayJobConfig

HEAD = {"serviceName": "head-svc", "serviceIP": "127.0.0.1"}
CLUSTER = {"state": "ready", "head": HEAD, "endpoints": {"dashboard": "8265", "client": "10001"}}


class Api(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {"rayclusters": {}, "rayjobs": {}, "leases": {}}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """The object or the list that a request is answered with; None if there is none."""
        kind, name = [*path.split("/")[6:], ""][:2]  # after the API, its version and the namespace
        found = self.objects[kind]
        self.requests += [(method, kind)] if method != "GET" else []
        if method == "POST":
            if (name := body["metadata"]["name"]) in found:
                raise FileExistsError(name)
            found[name] = body
            self._reconcile(kind, name, body)
        elif method == "DELETE":
            return found.pop(name, None)
        elif method == "PATCH":
            for change in body:
                *parents, last = [p.replace("~1", "/") for p in change["path"].split("/")[1:]]
                target = found[name]
                for parent in parents:
                    target = target.setdefault(parent, {})
                target[last] = change["value"]
        elif not name:
            wanted = dict(
                one.split("=") for one in query.get("labelSelector", [""])[0].split(",") if one
            )
            labelled = [
                each
                for each in found.values()
                if wanted.items() <= each["metadata"]["labels"].items()
            ]
            return {"items": labelled}
        return found.get(name)

    def _reconcile(self, kind: str, name: str, body: Any) -> None:
        """What KubeRay's operator does for a new object."""
        if kind == "rayclusters":
            body["status"] = CLUSTER
        elif kind == "rayjobs":
            cluster = {"metadata": {"name": f"{name}-cluster", "labels": {}}, "status": CLUSTER}
            self.objects["rayclusters"][f"{name}-cluster"] = cluster
            body["status"] = {"jobDeploymentStatus": "Waiting", "rayClusterName": f"{name}-cluster"}


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def _respond(self) -> None:
        url = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        path = unquote(url.path).removesuffix("/status")
        try:
            with self.server.lock:
                found = self.server.answer(self.command, path, parse_qs(url.query), body)
                text = json.dumps(found or {"kind": "Status", "code": 404}).encode()
            done = 201 if self.command == "POST" else 200
            self.send_response(404 if found is None else done)
        except FileExistsError:
            text = b"{}"
            self.send_response(409)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_DELETE = _respond

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def api(folder: Path) -> Iterator[tuple[Api, str]]:
    server = Api()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_address[1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": at}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    try:
        yield server, str(path)
    finally:
        server.shutdown()
        server.server_close()


class Cluster(KubeRayCluster):
    def resolve_hostname(self, service_name: str, namespace: str) -> str:
        return HEAD["serviceIP"]


class Job(KubeRayInteractiveJob):
    def resolve_hostname(self, service_name: str, namespace: str) -> str:
        return HEAD["serviceIP"]


def resource(kind: str, kube_config: str, port: int) -> RayResource:
    """A resource: a "shared" cluster, one that each step has "deleted", or a "job"."""
    given: dict[str, Any] = {"image": "vane-dagster", "redis_port": port, "poll_interval": 0.05}
    if kind == "job":
        return Job(
            ray_job=InteractiveRayJobConfig(metadata={"name": "docs"}),
            lifecycle=Lifecycle(cleanup="never"),
            client=RayJobClient(kube_config),
            **given,
        )
    return Cluster(
        ray_cluster=RayClusterConfig(),
        cluster_sharing=ClusterSharing(enabled=kind == "shared"),
        client=RayClusterClient(kube_config),
        **given,
    )
