"""The site's end of Flower: every message holds a signed request, every reply is what `Site.answer` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr import app as flower
from flwr.clientapp import ClientApp

from waffle_fl.deploy.site import Site, reason, software
from waffle_fl.engines.flower.messages import Message, packed, unpacked

MAX_BYTES = 1 << 34  # what Flower itself has let through already


def app_of(folder: Path) -> ClientApp:
    """The ClientApp of the site in this folder."""
    app = ClientApp()

    @app.query()
    @app.train()
    def answer(message: flower.Message, context: flower.Context) -> flower.Message:
        return flower.Message(packed(answered(folder, message.content)), reply_to=message)

    return app


def answered(folder: Path, content: Any) -> Message:
    """The reply to whatever came. Flower would send the text of an exception, and with it paths of this machine."""
    try:
        return Site(folder).answer(unpacked(content, MAX_BYTES))
    except Exception as error:
        return Message({"error": reason(error), "software": software()})
