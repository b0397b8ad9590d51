"""A ClientApp that sends false replies: it wraps the honest one in a real process that Flower starts."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

TWICE, UNREADABLE = "W9 two replies", "unreadable"


def search_path(folder: Path) -> str:
    """Write a folder that, on PYTHONPATH, makes the ClientApps of sites lie as their `lies.json` says."""
    folder.mkdir()
    here = str(Path(__file__).parent)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {here!r})\nimport flower_liar\n\nflower_liar.hook()\n"
    )
    return str(folder)


def hook() -> None:
    """Replace the ClientApp that this process imports by one that changes the honest replies."""
    honest_import = importlib.import_module

    def import_with_lies(name: str, package: str | None = None) -> Any:
        known = name in sys.modules
        module: Any = honest_import(name, package)
        if name == "waffle_fl.deploy.client_app" and not known:
            install_lies(module, Path(sys.argv[1]))
        return module

    importlib.import_module = import_with_lies


def install_lies(module: Any, site: Path) -> None:
    """Insert the lies between the site's reply and Flower."""
    lies: Any = import_module("flower_lies")
    honest, message, current_round = module.Site, module.flower.Message, [0]

    class Liar(honest):  # type: ignore[misc]
        def answer(self, request: Any) -> Any:
            current_round[0] = request.fields.get("tasks", [{}])[0].get("round", 0)
            return lies.apply_lie(site, request, super().answer(request))

    def send_with_lie(content: Any, reply_to: Any) -> Any:
        lie = lies.scheduled_lie(site, current_round[0])
        if lie == TWICE:
            (site / "replayed.json").write_text(json.dumps(push_and_replay(site, message(content, reply_to=reply_to))))
            content = module.packed(lies.Message({"error": "the second reply"}))
        if lie == UNREADABLE:
            make_unreadable(content)
        return message(content, reply_to=reply_to)

    module.Site, module.flower = Liar, SimpleNamespace(Message=send_with_lie)


def make_unreadable(content: Any) -> None:
    """Replace the JSON fields by a record that Flower transfers but cannot read at the server."""
    from flwr.app import ConfigRecord
    from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

    class Garbled(ConfigRecord):
        def deflate(self) -> bytes:
            return add_header_to_object_body(object_body=b"\xff" * 40, obj=self)

    Garbled.__qualname__ = ConfigRecord.__qualname__
    content["words"] = Garbled(dict(content["words"]))


class Recorder:
    """Record every request as it was signed and sent."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        self.requests.append(context.request)
        response: httpx.Response = call_next(context)
        return response


def fleet_client(site: Path, recorder: Recorder) -> Any:
    """Return a client of the SuperLink with this site's key, as a SuperNode has one."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key((site / "node.key").read_bytes(), None)
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    chain: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed, recorder]
    folders: Any = import_module("waffle_fl.deploy.settings_files")
    return FleetHttpClient.from_server_address(
        folders.read_site(site).server, False, (site / "ca.crt").read_bytes(), chain
    )


def replay(site: Path, request: httpx.Request) -> int:
    """Return the HTTP status that the same bytes get over another connection."""
    import ssl

    with httpx.Client(verify=ssl.create_default_context(cafile=str(site / "ca.crt"))) as another:
        return another.request(
            request.method, request.url, headers=request.headers, content=request.content
        ).status_code


def push_and_replay(site: Path, reply: Any) -> list[int]:
    """W9, F9: send a reply as a SuperNode does, replay all its requests, and return the statuses of the replays."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
    from flwr.supercore.inflatable.inflatable_utils import push_objects

    reply.metadata.__dict__["_message_id"] = reply.object_id
    recorder, node = Recorder(), Node(node_id=reply.metadata.src_node_id)
    with fleet_client(site, recorder) as client:
        objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
        response = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.0],
            )
        )
        push = make_push_object_fn_protobuf(client.PushObject, node, reply.metadata.run_id, response.session_id)
        push_objects(objects, push, object_ids_to_push=set(response.objects_to_push))
    return [replay(site, request) for request in recorder.requests]
