"""A page for a browser on this machine, below a secret path: what `prefer` and `watch` have in common."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

TEMPLATES = Path(__file__).parent / "templates"
FILES = {"": ("page.html", "text/html"), "page.js": ("page.js", "text/javascript"), "page.css": ("page.css", "text/css")}  # fmt: skip
"""Path below the token -> file of the page and its type."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of each answer. What is shown is untrusted: the page may load and run its own files alone, and sets texts as text."""


class Refused(Exception):
    """A request that is refused; holds the status and the reason."""


def require_packages(command: str) -> None:
    """Raises a ConfigError if the packages of a server are not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"{command} needs {' and '.join(missing)}: pip install 'leyden[serve]'")


def new_token() -> str:
    """Returns a path that no page of another site, and no other user of this machine, can guess."""
    return secrets.token_urlsafe(24)


def page_app(template: str, token: str, routes: Sequence[Route]) -> Starlette:
    """Returns the ASGI application of a page.

    Args:
        template: Folder of its files in `templates`.
        token: All is below this path.
        routes: What the page asks for, relative to it; their answers have `HEADERS`.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Mount, Route

    files = [Route(f"/{path}", _file(TEMPLATES / template, *file)) for path, file in FILES.items()]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])
    handlers: Any = {Refused: _refused, 404: _nothing, 405: _nothing}
    mounted = Mount(f"/{token}", routes=[*files, *routes])
    return Starlette(routes=[mounted], middleware=[hosts], exception_handlers=handlers)


def _file(folder: Path, name: str, kind: str) -> Any:
    from starlette.responses import Response

    content = (folder / f"{name}.template").read_text(encoding="utf-8")

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer


async def _refused(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    status, reason = error.args
    return JSONResponse({"error": reason}, status, HEADERS)


async def _nothing(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": "Nothing is here."}, getattr(error, "status_code", 404), HEADERS)
