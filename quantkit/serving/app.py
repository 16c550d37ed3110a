"""The application: routes over the models of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp

from quantkit import __version__
from quantkit.serving.body import BodyRoute
from quantkit.serving.errors import install
from quantkit.serving.guard import GuardMiddleware
from quantkit.serving.ignored import IgnoredLog
from quantkit.serving.metrics import Metrics
from quantkit.serving.models import ServedEngine, ServedModels
from quantkit.serving.openapi import describe
from quantkit.serving.page import page
from quantkit.serving.reply import Responder
from quantkit.serving.routes import add_routes

OnError = Callable[[BaseException], None]


class Application:
    """A server's ASGI application, with what a process needs to end it well.

    Args:
        api: The application with the routes.
        guard: The middleware before them.
        refuse_more: This is called once the server is ending: no new work is taken, and what was begun goes
            on.
        close: This ends what answers; answers that aren't complete are cut.
    """

    def __init__(self, api: ASGIApp, guard: GuardMiddleware, *, refuse_more: Callable[[], None],
                 close: Callable[[], None]) -> None:
        self.api = api
        self.guard = guard
        self.close = close
        self._refuse_more = refuse_more
        self.draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.guard(scope, receive, send)

    async def drain(self, timeout: float | None = None) -> bool:
        """Be not ready from now on, take no new work, and wait until all answers are complete.

        Args:
            timeout: seconds; ``None`` waits for ever.

        Returns:
            Whether they are.
        """
        self.draining = True
        # the engines go on: an answer under way may need more of them, and is complete only when it was sent
        self._refuse_more()
        self.guard.stop_reading()
        try:
            async with asyncio.timeout(timeout):
                await self.guard.idle()
        except TimeoutError:
            return False
        return True


def create_app(models: Sequence[ServedEngine], *, loopback: bool = True, hosts: Collection[str] = (),
               keys: Collection[str] = (), on_error: OnError | None = None,
               on_ignored: Callable[[str], None] | None = None) -> Application:
    """The application over started engines.

    Args:
        models: The models that are served, each with an engine of its own and another name.
        loopback, hosts, keys: They say who may come in; see
            :class:`quantkit.serving.guard.GuardMiddleware`.
        on_error: This is told about errors that are nobody's request's fault.
        on_ignored: This is told what is ignored in requests: a line for each kind of it and each client.

    Raises:
        UsageError: there is no model, or two have the same name.
    """
    served = ServedModels(models)
    api = FastAPI(title="quantkit", version=__version__, docs_url=None, redoc_url=None,
                  redirect_slashes=False)
    api.router.route_class = BodyRoute
    api.state.strict_requests = served.strict_requests
    api.state.ignored_log = None if on_ignored is None else IgnoredLog(on_ignored)
    on_error = None if on_error is None else told_once(on_error)
    install(api, on_error)
    for model in served:
        model.prepare()  # the first request then waits for its own answer only
    guard = GuardMiddleware(api, loopback=loopback, hosts=hosts, keys=keys, on_error=on_error)
    metrics = Metrics([(model.name, model.engine) for model in served])
    responder = Responder(served, metrics, on_error)
    application = Application(api, guard, refuse_more=responder.refuse_more, close=served.close)
    locked = (401,) if keys else ()
    add_routes(api, responder, metrics, lambda: application.draining, locked)
    describe(api, served, key=bool(keys))
    html, policy = page()

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # agents ask whether it is there
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Frame-Options": "DENY"})

    return application


def told_once(on_error: OnError) -> OnError:
    """The same, for which an error that ends several requests is one error."""

    def tell(error: BaseException) -> None:
        if not getattr(error, "_told", False):
            vars(error)["_told"] = True
            on_error(error)

    return tell
