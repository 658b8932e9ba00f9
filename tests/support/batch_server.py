"""The files and batches of OpenAI's API, and the message batches of Anthropic's, with faults.

Requests are answered by the `llm_server.Server` beside it, whose words make them fail. In addition,
a request with "expires" expires when it is first sent, one with "lost" is left out of the answers
when it is first sent, and one with "twice" is delivered as an error and as an answer.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.llm_server import KEY, Server, _error
from support.published_apis import said

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WINDOW = 24 * 3600


@dataclass
class Made:
    """A batch."""

    id: str
    at: float
    lines: list[tuple[str, Any]]
    metadata: dict[str, str] = field(default_factory=dict)
    endpoint: str = ""
    answers: list[tuple[str, str, int, Any]] | None = None
    canceling: bool = False


class Batches:
    """The batches of both APIs.

    Attributes:
        made: The batches, in the order in which they were made.
        sent: How often each custom id's digest was sent.
        ends_at_once: Whether a batch ends when it is first looked at; else when `end` is called.
        drop_connection: The number of coming batches that are made, with an error as the response.
        refuse: The error of the next batch's creation, as status and message.
        max_requests: More requests in a batch make it fail.
        keeps_answers: Whether the answers of batches that have ended can still be read.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.clear()

    def clear(self) -> None:
        self.made: list[Made] = []
        self.files: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.ends_at_once = True
        self.drop_connection = 0
        self.refuse: tuple[int, str] | None = None
        self.max_requests = 50_000
        self.keeps_answers = True
        self.page = 2

    @property
    def prompts(self) -> Counter[str]:
        return Counter(said(b["messages"][-1]["content"]) for m in self.made for _, b in m.lines)

    def end(self) -> None:
        for made in self.made:
            if made.answers is None:
                self._answer(made)

    def routes(self) -> list[Route]:
        given: list[tuple[str, str, Callable[[Request], Any]]] = [
            ("POST", "/v1/files", self._upload),
            ("GET", "/v1/files/{id}/content", self._content),
            ("POST", "/v1/batches", self._create),
            ("GET", "/v1/batches", lambda r: self._list(r, self._openai, "after")),
            ("GET", "/v1/batches/{id}", lambda r: self._get(r, self._openai)),
            ("POST", "/v1/batches/{id}/cancel", lambda r: self._cancel(r, self._openai)),
            ("POST", "/v1/messages/batches", self._create_messages),
            ("GET", "/v1/messages/batches", lambda r: self._list(r, self._anthropic, "after_id")),
            ("GET", "/v1/messages/batches/{id}", lambda r: self._get(r, self._anthropic)),
            ("POST", "/v1/messages/batches/{id}/cancel",
             lambda r: self._cancel(r, self._anthropic)),
            ("GET", "/v1/messages/batches/{id}/results", self._results),
        ]  # fmt: skip
        return [Route(path, self._checked(answer), methods=[verb]) for verb, path, answer in given]

    def _checked(self, answer: Callable[[Request], Any]) -> Any:
        async def respond(request: Request) -> Response:
            given = request.headers
            if KEY not in (given.get("x-api-key"), given.get("authorization", "")[7:]):
                return _error("Incorrect API key provided", 401)
            request.state.body = await request.body()
            found = answer(request)
            return found if isinstance(found, Response) else JSONResponse(found)

        return respond

    # OpenAI

    def _upload(self, request: Request) -> Any:
        boundary = request.headers["content-type"].partition("boundary=")[2].encode()
        parts = request.state.body.split(b"--" + boundary)
        named = {re.search(rb'name="(\w+)"', p)[1]: p for p in parts if b"name=" in p}  # type: ignore[index]  # each part has a name
        data = {name: p.partition(b"\r\n\r\n")[2][:-2] for name, p in named.items()}
        assert data[b"purpose"] == b"batch"
        id = f"file-{len(self.files)}"
        self.files[id] = data[b"file"]
        return {
            "id": id, "object": "file", "bytes": len(data[b"file"]), "purpose": "batch",
            "created_at": int(time.time()), "filename": "f.jsonl", "status": "processed",
        }  # fmt: skip

    def _content(self, request: Request) -> Response:
        if not self.keeps_answers:
            return _error("No such File object", 404)
        return Response(self.files[request.path_params["id"]])

    def _create(self, request: Request) -> Any:
        body = json.loads(request.state.body)
        assert body["completion_window"] == "24h"
        lines = [json.loads(each) for each in self.files[body["input_file_id"]].split(b"\n")]
        assert all(each["url"] == body["endpoint"] for each in lines)
        assert all(each["method"] == "POST" for each in lines)
        requests = [(each["custom_id"], each["body"]) for each in lines]
        return self._made(requests, self._openai, body.get("metadata") or {}, body["endpoint"])

    def _openai(self, made: Made) -> Any:
        problem = None
        status = "in_progress" if made.answers is None else "completed"
        if made.canceling:
            status = "cancelling" if made.answers is None else "cancelled"
        if len(made.lines) > self.max_requests:
            status, problem = "failed", {"object": "list", "data": [{"message": "too many lines"}]}
        given = [each for each in made.answers or () if each[1] != "lost"]
        files = {}
        if status != "failed":
            for name, is_output in (("output_file_id", True), ("error_file_id", False)):
                lines = [_line(*each) for each in given if (each[1] == "succeeded") is is_output]
                if lines:
                    files[name] = f"file-{made.id}-{name}"
                    self.files[files[name]] = b"\n".join(lines) + b"\n"
        return {
            "id": made.id, "object": "batch", "endpoint": made.endpoint, "errors": problem,
            "input_file_id": "file", "completion_window": "24h", "status": status,
            "created_at": int(made.at), "expires_at": int(made.at) + _WINDOW,
            "metadata": made.metadata,
            "request_counts": {"total": len(made.lines), "completed": 0, "failed": 0}, **files,
        }  # fmt: skip

    # Anthropic

    def _create_messages(self, request: Request) -> Any:
        requests = json.loads(request.state.body)["requests"]
        return self._made([(r["custom_id"], r["params"]) for r in requests], self._anthropic)

    def _anthropic(self, made: Made) -> Any:
        at = datetime.fromtimestamp(made.at, UTC)
        has_ended = made.answers is not None
        url = f"{self.url}/v1/messages/batches/{made.id}/results"
        statuses = Counter(status for _, status, _, _ in made.answers or ())
        kinds = {kind: statuses[kind] for kind in ("succeeded", "errored", "canceled", "expired")}
        return {
            "id": made.id, "type": "message_batch", "created_at": at.isoformat(),
            "expires_at": datetime.fromtimestamp(made.at + _WINDOW, UTC).isoformat(),
            "processing_status":
                "ended" if has_ended else "canceling" if made.canceling else "in_progress",
            "cancel_initiated_at": at.isoformat() if made.canceling else None,
            "request_counts": {"processing": 0 if has_ended else len(made.lines), **kinds},
            "ended_at": at.isoformat() if has_ended else None, "archived_at": None,
            "results_url": url if has_ended and self.keeps_answers else None,
        }  # fmt: skip

    url = ""

    def _results(self, request: Request) -> Response:
        lines = []
        for custom_id, status, code, body in self._found(request).answers or ():
            result: dict[str, Any] = {"type": status}
            if status == "succeeded":
                result["message"] = body
            elif status == "errored":
                kind = {400: "invalid_request_error", 429: "rate_limit_error", 500: "api_error"}
                error = {"type": kind[code], "message": body["error"]["message"]}
                result["error"] = {"type": "error", "error": error}
            lines.append(json.dumps({"custom_id": custom_id, "result": result}).encode())
        return Response(b"\n".join(lines) + b"\n")

    # Both

    def _made(
        self,
        lines: list[tuple[str, Any]],
        shown: Callable[[Made], Any],
        metadata: dict[str, str] | None = None,
        endpoint: str = "/v1/messages",
    ) -> Any:
        ids = [custom_id for custom_id, _ in lines]
        assert len(set(ids)) == len(ids)
        assert all(map(_ID.fullmatch, ids)), ids
        if self.refuse is not None:
            (status, message), self.refuse = self.refuse, None
            return _error(message, status)
        made = Made(f"batch_{len(self.made)}", time.time(), lines, metadata or {}, endpoint)
        self.made.append(made)
        self.sent.update(custom_id[:32] for custom_id in ids)
        if self.drop_connection:
            self.drop_connection -= 1
            return _error("bad gateway", 502)
        return shown(made)

    def _answer(self, made: Made) -> None:
        answers: list[tuple[str, str, int, Any]] = []
        for custom_id, body in reversed(made.lines):
            prompt = said(body["messages"][-1]["content"])
            is_first = self.sent[custom_id[:32]] == 1
            if made.canceling and "slow" in prompt:
                answers.append((custom_id, "canceled", 0, None))
            elif "expires" in prompt and is_first:
                answers.append((custom_id, "expired", 0, None))
            elif "lost" in prompt and is_first:
                answers.append((custom_id, "lost", 0, None))
            elif failed := self._server._failed(body, [prompt]):
                answers.append((custom_id, "errored", failed.status_code, json.loads(failed.body)))
            else:
                answer = self._server.messages if "messages" in made.endpoint else self._server.chat
                if "twice" in prompt:
                    error = {"error": {"message": "delivered before"}}
                    answers.append((custom_id, "errored", 500, error))
                answers.append((custom_id, "succeeded", 200, answer(body, prompt)))
        if made.endpoint == "/v1/messages":
            answers = [each for each in answers if each[1] != "lost"]
        made.answers = answers

    def _get(self, request: Request, shown: Callable[[Made], Any]) -> Any:
        made = self._found(request)
        self._look(made)
        return shown(made)

    def _look(self, made: Made) -> None:
        if self.ends_at_once and made.answers is None:
            self._answer(made)

    def _list(self, request: Request, shown: Callable[[Made], Any], cursor: str) -> Any:
        every = list(reversed(self.made))
        if after := request.query_params.get(cursor):
            every = every[[each.id for each in every].index(after) + 1 :]
        page = every[: self.page]
        for each in page:
            self._look(each)
        return {
            "object": "list", "data": [shown(each) for each in page],
            "has_more": len(every) > len(page), "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }  # fmt: skip

    def _cancel(self, request: Request, shown: Callable[[Made], Any]) -> Any:
        made = self._found(request)
        made.canceling = True
        return shown(made)

    def _found(self, request: Request) -> Made:
        return next(each for each in self.made if each.id == request.path_params["id"])


def _line(custom_id: str, status: str, code: int, body: Any) -> bytes:
    response: Any = {"status_code": code, "request_id": "r", "body": body}
    error = None
    if status in ("expired", "canceled"):
        kinds = {"expired": "batch_expired", "canceled": "batch_cancelled"}
        response, error = None, {"code": kinds[status], "message": "it was not executed"}
    found = {"id": "batch_req", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(found, ensure_ascii=False).encode()
