"""Chart of a shifted federation: labels per agent, sample images per group, relabelling, and drift over the rounds."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray

from waffle_fl.federation import Federation
from waffle_fl.report.charts import WIDTH, inline, label_panels, styled
from waffle_fl.shifts import Covariate, Prior, read_shifts
from waffle_fl.shifts.covariates import materialise

SAMPLES, GROUPS = 8, 5  # maximum numbers shown
SIDE = 32  # minimum side of a picture in pixels
INK, CHANGED = "#444444", "#d1495b"


def shift_chart(federation: Federation, shift: str, seed: int) -> Any:
    """Return a chart of the labels per agent, followed by one panel per kind of shift."""
    counts = {"training": federation.label_counts().tolist()}
    if any(isinstance(s, Prior) for s in read_shifts(shift)):
        counts["test"] = federation.label_counts("test").tolist()
    panels = [label_panels(counts)]
    covariates = [s for s in read_shifts(shift) if isinstance(s, Covariate)]
    if covariates:
        panels.append(_samples(federation, covariates, seed))
    if not federation.relabel.equal(federation.relabel[:1].expand_as(federation.relabel)):
        panels.append(_concepts(federation.relabel.tolist(), "what agents call each label"))
    if federation.later is not None:
        panels.append(_concepts(federation.later.tolist(), "what agents call each label in the end"))
        panels.append(_drift(federation))
    return styled(alt.vconcat(*panels, spacing=18))


def _samples(federation: Federation, covariates: Sequence[Covariate], seed: int) -> Any:
    """Return a panel of Alice's first samples as transformed for each group."""
    groups = min(max(shift.groups for shift in covariates), federation.agents, GROUPS)
    rows = federation.train[federation.alice][:SAMPLES]
    seen, _, parts = materialise(federation.x, {"train": (rows,) * groups}, covariates, 0, seed)
    low, high = federation.x[rows].min(), federation.x[rows].max()
    grey = (255 * (seen - low) / (high - low)).clamp(0, 255).byte().numpy()
    values = [
        {"group": "Alice's" if not group else str(group), "sample": k, "picture": _png(grey[row])}
        for group, shown in enumerate(parts["train"])
        for k, row in enumerate(shown.tolist())
    ]
    return (
        alt.Chart(inline(values))
        .mark_image(width=SIDE, height=SIDE)
        .encode(
            x=alt.X("sample:O", title="the same samples, as each group sees them", axis=alt.Axis(labels=False)),
            y=alt.Y("group:N", title="group", sort=None),
            url="picture:N",
        )
        .properties(width=(SIDE + 4) * SAMPLES, height=(SIDE + 4) * groups)
    )


def _png(sample: NDArray[np.uint8]) -> str:
    """Return an image (C, H, W), or a vector as a strip, as a PNG data URL; small images are enlarged."""
    image = sample if sample.ndim == 3 else sample.reshape(1, 1, -1)
    _, height, width = image.shape
    image = image.repeat(max(1, SIDE // height), axis=1).repeat(max(1, SIDE // width), axis=2)
    colours = image.transpose(1, 2, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in colours)
    head = struct.pack(">IIBBBBB", image.shape[2], image.shape[1], 8, 2 if len(image) == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    packed = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(packed)).decode()


def _concepts(relabel: list[list[int]], title: str) -> Any:
    """Return a panel of agents against labels with the label each agent uses, coloured where it is changed."""
    values = [
        {"agent": i, "label": k, "called": called, "color": CHANGED if called != k else INK}
        for i, row in enumerate(relabel)
        for k, called in enumerate(row)
    ]
    return (
        alt.Chart(inline(values))
        .mark_text()
        .encode(
            x=alt.X("label:O", title=title, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("agent:O", title="agent"),
            text="called:N",
            color=alt.Color("color:N", scale=None),
        )
        .properties(width=WIDTH * 0.62, height=16 * len(relabel))
    )


def _drift(federation: Federation) -> Any:
    """Return a panel of the share of the drifting agents' training samples that have the new label."""
    assert federation.turn is not None
    held = [rows for agent, rows in enumerate(federation.train) if federation.drifts(agent)]
    turns = federation.turn[torch.cat(held)].numpy()
    moments = np.linspace(0, 1, 101)
    values = [{"moment": round(float(m), 2), "share": round(float((turns < m).mean()), 4)} for m in moments]
    return (
        alt.Chart(inline(values))
        .mark_line(color=CHANGED, interpolate="step-after")
        .encode(
            x=alt.X("moment:Q", title="share of the rounds", axis=alt.Axis(grid=False, tickCount=5)),
            y=alt.Y("share:Q", title="new concept", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=3)),
        )
        .properties(width=WIDTH * 0.62, height=60)
    )
