"""The site's end of Flower: every message is a parcel, every reply is what `Site.answer` says."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from waffle_fl.deploy.site import Site
from waffle_fl.engines.flower.messages import packed, unpacked

MAX_BYTES = 1 << 34  # what Flower itself has let through already


def app_of(folder: Path) -> ClientApp:
    """The ClientApp of the site in this folder."""
    handler = logging.FileHandler(folder / "site.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("waffle_fl").addHandler(handler)
    app = ClientApp()

    @app.query()
    @app.train()
    def answer(message: Message, context: Context) -> Message:
        reply = Site(folder).answer(unpacked(message.content, MAX_BYTES))
        return Message(packed(reply), reply_to=message)

    return app
