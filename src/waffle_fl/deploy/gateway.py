"""The server's two doors: sites reach Flower's Fleet API and nothing else; all other APIs are on loopback, locked.

Flower serves its Fleet, Control and Runtime APIs as one application. `Gate` stands in front of it and knows by which
socket a request came. The public socket passes the few Fleet calls that a SuperNode makes. The local one passes the
Runtime API, which has locks of its own (Flower's SuperExec secret, a token per task), and the Control API for requests
with the secret that only the operator's account can read.
"""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTROL_HEADER = "x-waffle-control-secret"
FLEET = frozenset(  # all that a registered SuperNode calls; it neither registers nor removes itself
    f"/v1/fleet/{call}"
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "get-run", "get-fab"),
        *("pull-messages", "push-messages", "pull-object", "push-object", "confirm-message-received"),
    )
)
LOCAL = ("/v1/runtime/", "/v1/fleet/", "/health")
CONTROL = "/v1/control/"
SPARE = 1 << 20  # bytes around a piece of a message
KEY_HEADER = b"flwr-public-key"
NOT_ADMITTED = json.dumps(  # as Flower writes its errors, so that a SuperNode prints it
    {
        "code": 2004,
        "detail": "Failed to activate SuperNode: the server does not admit this site's key (not added yet, replaced or "
        "revoked)",
    }
).encode()


@dataclass(frozen=True)
class Gateway:
    """Forwards a request, or rejects it with a status code; only a rejected key gets an explanation in the body."""

    app: App
    public_port: int
    secret: str
    max_body: int
    is_admitted: Callable[[bytes], bool]  # is this the public key of a site, as the request's header has it?

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        refused = self.refusal(scope)
        if not refused:
            await self.app(scope, receive, send)
        else:
            body = NOT_ADMITTED if refused == 401 else b""
            headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": refused, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def refusal(self, scope: Scope) -> int:
        """The status with which a request is refused; 0 if it may pass."""
        path, headers = scope["path"], dict(scope["headers"])
        if (scope.get("server") or ("", 0))[1] == self.public_port:
            length = headers.get(b"content-length", b"")
            if path not in FLEET:
                return 404
            if not self.is_admitted(headers.get(KEY_HEADER, b"")):  # before a byte of the body is read
                return 401
            return 0 if length.isdigit() and len(length) < 16 and int(length) <= self.max_body else 413
        if path.startswith(CONTROL):
            shown = headers.get(CONTROL_HEADER.encode(), b"")
            return 0 if hmac.compare_digest(shown, self.secret.encode()) else 403
        return 0 if path.startswith(LOCAL) else 404


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; OSError says why none can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
