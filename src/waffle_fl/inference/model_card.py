"""The card of an exported model: what it is, how it was made, how good it is, on whom, and what it is not."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from waffle_fl.algorithms import title_of
from waffle_fl.config import SCHEMA
from waffle_fl.data import normalisation_of
from waffle_fl.inference.trained_run import Trained
from waffle_fl.results import FinishedRun, named_weights

FEW = 100  # test samples below which a metric is a rough estimate


def card(trained: Trained, digests: Mapping[str, str]) -> dict[str, Any]:
    """All that a reader of the model needs to know, as JSON; `digests` are those of the files beside it."""
    run, made = trained.run, trained.run.provenance
    config, binding = run.config.to_json(), made.get("binding", {})
    return {
        "schema": SCHEMA,
        "name": run.folder.resolve().name,
        "task": trained.task,
        "classes": list(trained.classes),
        "method": config["method"],
        "options": config["options"],
        "settings": {**config["settings"], "data": run.config.settings.data_name},  # its name, and no path
        "alice": alice_of(run),
        "metrics": {**run.result.get("metrics", {}), "test_samples": made.get("test_samples")},
        "rounds": run.result["rounds"],
        "contributors": contributors(run),
        "data": {
            "digest": binding.get("data"),
            **{key: made[f"data_{key}"] for key in ("verified", "note") if f"data_{key}" in made},
        },
        "input": {
            "shape": ["rows", *trained.shape],
            "dtype": str(trained.dtype).removeprefix("torch."),
            "preprocessing": _preprocessing(trained),
        },
        "output": _output(trained),
        "results_version": binding.get("results_version"),
        "software": {"waffle-fl": made.get("waffle"), "python": made.get("python"), "torch": binding.get("torch")},
        "device": binding.get("device"),
        "files": dict(digests),
        "intended_use": _intended_use(trained),
        "limits": _limits(trained),
    }


def alice_of(run: FinishedRun) -> str:
    """The name of the agent that the model is for."""
    return str(run.provenance["agents"][run.provenance["alice"]])


def contributors(run: FinishedRun) -> dict[str, dict[str, float]]:
    """Each agent's weight: its mean over the rounds, and in the last."""
    rounds = [named_weights(run.provenance, line["weights"]) for line in run.rounds if line.get("weights")]
    return {
        name: {"mean_weight": mean(line[name] for line in rounds), "last_weight": rounds[-1][name]}
        for name in (rounds[-1] if rounds else ())
    }


def _preprocessing(trained: Trained) -> dict[str, Any] | None:
    """How an input is made of a table's row or of a published sample; None where it is used as it is."""
    if trained.preprocessing:
        return trained.preprocessing.to_json()
    found = normalisation_of(trained.run.config.settings.data)
    if found is None:
        return None
    return {
        "formula": "(value / divisor - mean) / std, for each channel",
        "divisor": found.divisor,
        "mean": list(found.mean),
        "std": list(found.std),
        "layout": "channels, height, width",
    }


def _output(trained: Trained) -> str:
    if trained.task == "classification":
        return "one score for each class, in the order of `classes`; softmax makes probabilities of them"
    if trained.preprocessing is None:
        return "the predicted number"
    return "the predicted number; model.safetensors alone gives it standardised (target_mean, target_deviation)"


def _intended_use(trained: Trained) -> str:
    run = trained.run
    what = f"tell {len(trained.classes)} classes apart" if trained.task == "classification" else "predict a number"
    return (
        f"To {what} for {alice_of(run)}, on data that comes about as hers did. {title_of(run.config.method)} trained "
        "it with the other agents' help, but for her alone."
    )


def _limits(trained: Trained) -> list[str]:
    run, alice = trained.run, alice_of(trained.run)
    tested = int(run.provenance.get("test_samples") or 0)
    few = " so few that they are rough estimates," if tested < FEW else ""
    limits = [
        f"The metrics are those of {tested} test samples of {alice},{few} and say nothing of anyone else's data.",
        "The model is that of the last round; no test sample took part in choosing it.",
        "A contributor's weight tells how far its updates were used for this model, not how good its data is.",
        "It was trained without a formal privacy guarantee: do not publish it where its training data is secret.",
    ]
    if trained.classes:
        limits.append("It always names one of its classes, also for a sample that belongs to none of them.")
    if trained.preprocessing:
        limits.append("A category that nobody trained on is refused; so is a table that lacks a column.")
    if run.provenance.get("data_verified") is False:
        limits.append("The data was not the official one, or could not be verified.")
    return limits + [f"Noted before training: {note}." for note in run.provenance.get("notes", [])]
