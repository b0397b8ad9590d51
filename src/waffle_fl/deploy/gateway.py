"""Access control of the server's two ports: sites reach Flower's Fleet API only; all other APIs are on loopback.

Flower serves its Fleet, Control and Runtime APIs as one application. `Gateway` wraps it and distinguishes requests by
the socket they arrive on. The public socket forwards only the Fleet calls that a SuperNode makes. The local socket
forwards the Runtime API, which Flower itself protects (the SuperExec secret, a token per task), and the Control API for
requests with the secret that only the operator's account can read.
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
FLEET = frozenset(  # all calls of a registered SuperNode; registration and removal are the operator's
    f"/v1/fleet/{call}"
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "get-run", "get-fab"),
        *("pull-messages", "push-messages", "pull-object", "push-object", "confirm-message-received"),
    )
)
ACTIVATE = "/v1/fleet/activate-node"
LOCAL = ("/v1/runtime/", "/v1/fleet/", "/health")
CONTROL = "/v1/control/"
SPARE = 1 << 20  # bytes of framing around a chunk of a message
KEY_HEADER = b"flwr-public-key"
NOT_ADMITTED = json.dumps(  # in Flower's error format, so that a SuperNode prints it
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
    is_admitted: Callable[[bytes], bool]  # whether this header value is the public key of an admitted site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        rejection = self.refusal(scope)
        if not rejection:
            await self.app(scope, receive, send)
        else:
            body = NOT_ADMITTED if rejection in (401, 412) else b""
            headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": rejection, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def refusal(self, scope: Scope) -> int:
        """Return the HTTP status that rejects a request, or 0 if it is allowed."""
        path, headers = scope["path"], dict(scope["headers"])
        if (scope.get("server") or ("", 0))[1] == self.public_port:
            length = headers.get(b"content-length", b"")
            if path not in FLEET:
                return 404
            if not self.is_admitted(headers.get(KEY_HEADER, b"")):  # before a byte of the body is read
                # A SuperNode ends silently on 401; on 412, Flower's status for a failed activation, it prints the body.
                return 412 if path == ACTIVATE else 401
            return 0 if length.isdigit() and len(length) < 16 and int(length) <= self.max_body else 413
        if path.startswith(CONTROL):
            shown = headers.get(CONTROL_HEADER.encode(), b"")
            return 0 if hmac.compare_digest(shown, self.secret.encode()) else 403
        return 0 if path.startswith(LOCAL) else 404


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address; raises OSError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
