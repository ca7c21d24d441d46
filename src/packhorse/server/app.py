"""The application: routes, their OpenAPI document, and the parts put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TextIO

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from packhorse import __version__
from packhorse.core.errors import PackhorseError
from packhorse.server import schema
from packhorse.server.config import ServerConfig
from packhorse.server.errors import ApiError, to_api_error
from packhorse.server.gate import Gate
from packhorse.server.service import Service
from packhorse.server.stream import BrokenAnswerError
from packhorse.server.worker import Status

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BODIES: tuple[type[BaseModel], ...] = (
    schema.ChatRequest,
    schema.CompletionRequest,
    schema.TokenizeRequest,
    schema.DocumentRequest,
)
_REF = "#/components/schemas/{model}"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
}


def make_app(service: Service, *, log: TextIO | None = None) -> Gate:
    """The ASGI application around a service. Loading begins with its lifespan, when the port is bound."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        expiring = asyncio.create_task(service.documents.expire_for_ever())
        yield
        expiring.cancel()
        await service.worker.stop()

    app = FastAPI(title="Packhorse", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_routes(app, service)
    _add_error_handlers(app)
    _add_cors(app, service.config)
    make_openapi = app.openapi
    app.openapi = lambda: _with_bodies(make_openapi(), service)  # type: ignore[method-assign]
    return Gate(app, service.config, service.keyring, service.metrics, log)


def _add_routes(app: FastAPI, service: Service) -> None:
    post = _posting(app)

    @app.get("/health", response_model=schema.HealthBody, responses={503: {"model": schema.HealthBody}})
    async def health() -> Response:
        now = service.worker.health
        alive = now.status in (Status.READY, Status.DEGRADED)
        return JSONResponse({"status": now.status, "reason": now.reason or None}, 200 if alive else 503)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {METRICS_TYPE: {"schema": {"type": "string"}}}}, **_only(401, 403)},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @app.get("/plan", response_model=schema.PlanBody, responses=_only(401, 403, 503))
    async def plan() -> Response:
        return JSONResponse(service.plan())

    @app.get("/v1/models", response_model=schema.ModelList, responses=_only(401, 403, 503))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.describe()]})

    @app.get("/v1/models/{name:path}", response_model=schema.ModelBody, responses=_only(401, 403, 404, 503))
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.describe())

    @post("/v1/chat/completions", schema.ChatRequest, schema.ChatCompletion, stream=True)
    async def chat_completions(request: Request) -> Response:
        return await service.chat(request)

    @post("/v1/completions", schema.CompletionRequest, schema.Completion, stream=True)
    async def completions(request: Request) -> Response:
        return await service.complete(request)

    @post("/v1/tokenize", schema.TokenizeRequest, schema.Tokens)
    async def tokenize(request: Request) -> Response:
        ids, headers = await service.tokenize(request)
        window = service.session.window
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": window}, headers=headers)

    @post("/v1/documents", schema.DocumentRequest, schema.DocumentBody, stream=True)
    async def add_document(request: Request) -> Response:
        return await service.documents.ingest(request)

    @app.get("/v1/documents", response_model=schema.DocumentList, responses=_only(400, 401, 403, 503))
    async def list_documents(request: Request) -> Response:
        return JSONResponse(await service.documents.listing(request.state.call))

    one = "/v1/documents/{name}"

    @app.get(one, response_model=schema.DocumentBody, responses=_only(400, 401, 403, 404, 503))
    async def show_document(request: Request, name: str) -> Response:
        return JSONResponse(await service.documents.show(request.state.call, name))

    @app.delete(one, response_model=schema.DeletedDocument, responses=_only(400, 401, 403, 404, 503))
    async def delete_document(request: Request, name: str) -> Response:
        return JSONResponse(await service.documents.delete(request.state.call, name))


def _posting(app: FastAPI) -> Callable[..., Callable[..., Any]]:
    """app.post for routes that read their body themselves, with the body in the OpenAPI document."""

    def post(
        path: str, body: type[BaseModel], answer: type[BaseModel], *, stream: bool = False
    ) -> Callable[..., Any]:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        responses = dict(_ERRORS)
        if stream:
            # OpenAPI 3.1 has no schema for the events of a stream: the type alone is said.
            responses[200] = {"content": {"text/event-stream": {}}}
        return app.post(
            path,
            response_model=answer,
            responses=responses,
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )

    return post


def _only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _ERRORS[status] for status in statuses}


def _with_bodies(document: dict[str, Any], service: Service) -> dict[str, Any]:
    """The OpenAPI document with the schemas of the bodies, and the names of the model that is served."""
    _, made = models_json_schema([(body, "validation") for body in BODIES], ref_template=_REF)
    names = list(dict.fromkeys((service.name, service.model)))
    for body in BODIES:
        made["$defs"][body.__name__]["properties"]["model"] = {"type": "string", "enum": names}
    document["components"]["schemas"].update(made["$defs"])
    return document


def _add_error_handlers(app: FastAPI) -> None:
    async def respond(request: Request, error: Exception) -> Response:
        problem = to_api_error(error)
        if not isinstance(error, BrokenAnswerError):  # the call knows why that one was cut off
            request.state.call.code = problem.code
        return problem.response(request.state.call.id)

    for kind in (ApiError, PackhorseError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)


def _add_cors(app: FastAPI, config: ServerConfig) -> None:
    if config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "x-packhorse-ignored"],
        )
