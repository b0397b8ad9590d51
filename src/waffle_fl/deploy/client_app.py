"""The site's Flower app: each message holds a signed request, each reply is the return value of `Site.answer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr import app as flower
from flwr.clientapp import ClientApp

from waffle_fl.deploy.site import Site, reason, software
from waffle_fl.engines.flower.messages import Message, packed, unpacked

MAX_BYTES = 1 << 34  # Flower applies its own, smaller limits before


def app_of(folder: Path) -> ClientApp:
    """Return the ClientApp of the site in this folder."""
    app = ClientApp()

    @app.query()
    @app.train()
    def answer(message: flower.Message, context: flower.Context) -> flower.Message:
        return flower.Message(packed(answered(folder, message.content)), reply_to=message)

    return app


def answered(folder: Path, content: Any) -> Message:
    """Return the reply to any content. Catches all errors: Flower would send the traceback, with local paths."""
    try:
        return Site(folder).answer(unpacked(content, MAX_BYTES))
    except Exception as error:
        return Message({"error": reason(error), "software": software()})
