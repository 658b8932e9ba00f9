"""An application of Ray Serve for tests: two deployments, one of which calls the other."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI
from ray import serve

from support.serve_words import loud

api = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Shout:
    """Answers in capitals."""

    def run(self, text: str) -> str:
        return loud(text)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Front:
    """Passes texts on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @api.post("/shout")
    async def shout(self, body: dict) -> dict:
        return {"text": await self._inner.run.remote(body["text"]), "pid": os.getpid()}


app = Front.bind(Shout.bind())
