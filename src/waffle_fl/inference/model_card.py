"""The model card of an exported model: its training, metrics, intended use and limits."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from waffle_fl.algorithms import title_of
from waffle_fl.config import SCHEMA
from waffle_fl.data import normalisation_of
from waffle_fl.inference.model_files import memory_in
from waffle_fl.inference.trained_run import Trained
from waffle_fl.results import FinishedRun, named_weights

FEW = 100  # test samples below which a metric is a rough estimate


def card(trained: Trained, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the model card as JSON; `digests` are those of the exported files."""
    run, made = trained.run, trained.run.provenance
    config, binding = run.config.to_json(), made.get("binding", {})
    return {
        "schema": SCHEMA,
        "name": run.folder.resolve().name,
        "task": trained.task,
        "classes": list(trained.classes),
        "method": config["method"],
        "options": config["options"],
        "settings": {**config["settings"], "data": run.config.settings.data_name},  # the name, not the path
        "alice": alice_of(run),
        "metrics": {**run.result.get("metrics", {}), "test_samples": made.get("test_samples")},
        "rounds": run.result["rounds"],
        "contributors": contributors(run),
        "privacy": run.provenance.get("privacy"),
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
    """Return each agent's mean weight over the rounds and its weight in the last round."""
    rounds = [named_weights(run.provenance, line["weights"]) for line in run.rounds if line.get("weights")]
    return {
        name: {"mean_weight": mean(line[name] for line in rounds), "last_weight": rounds[-1][name]}
        for name in (rounds[-1] if rounds else ())
    }


def _preprocessing(trained: Trained) -> dict[str, Any] | None:
    """Return the preprocessing of a table's row, of an array or of a published sample; None if there is none."""
    if trained.preprocessing:
        content = trained.preprocessing.to_json()
        for column in content["columns"]:
            del column["low"], column["high"]  # values of single rows, which a published card must not contain
        return content
    if trained.scaling:
        per = "feature" if len(trained.shape) < 2 else "channel, the first axis of a sample"
        bound = f", clipped at -{trained.scaling.clip:g} and {trained.scaling.clip:g}" if trained.scaling.clip else ""
        return {
            "formula": f"(value - mean) / deviation, for each {per}{bound}; 0 if the deviation is 0",
            "included": "in the exported programs; model.safetensors alone takes standardised inputs",
            "bytes": "value / 127.5 - 1 before; no program includes it",
            **trained.scaling.to_json(),
        }
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
        what = "score per class" if memory_in(trained.module) is None else "logarithm of a probability per class"
        return f"one {what}, in the order of `classes`; softmax turns them into probabilities"
    if trained.preprocessing is None and trained.scaling is None:
        return "the predicted number"
    return "the predicted number; model.safetensors alone returns it standardised (target_mean, target_deviation)"


def _intended_use(trained: Trained) -> str:
    run = trained.run
    purpose = f"distinguish {len(trained.classes)} classes" if trained.task == "classification" else "predict a number"
    return (
        f"To {purpose} for {alice_of(run)}, on data collected as its training data were. "
        f"{title_of(run.config.method)} trained it with the other agents, for this agent only."
    )


def _privacy_limit(run: FinishedRun) -> str:
    guarantee = run.config.settings.guarantee
    if not guarantee:
        return (
            "It was trained without a formal privacy guarantee: do not publish it if its training data is confidential."
        )
    simulated = (
        ""
        if run.provenance.get("privacy", {}).get("noise") == "secret"
        else " This is a simulation, whose noise is computed from the seed among the settings. The guarantee is that "
        "of a deployment with these settings; do not publish this model as private."
    )
    return (
        f"Differential privacy: {guarantee}. It does not cover statistics of the preprocessing, validation and test "
        f"samples, hyperparameters chosen on this data, or other models trained on it.{simulated}"
    )


def _limits(trained: Trained) -> list[str]:
    run, alice = trained.run, alice_of(trained.run)
    tested = int(run.provenance.get("test_samples") or 0)
    few = " too few for more than rough estimates," if tested < FEW else ""
    last = run.config.settings.final_model == "last"
    limits = [
        f"The metrics are measured on {tested} test samples of {alice},{few} and do not apply to other agents' data.",
        f"The model is that of the {'last round' if last else 'round with the best validation score'}; it was not "
        "selected on test samples.",
        "A contributor's weight shows how much its updates were used for this model, not the quality of its data.",
        _privacy_limit(run),
    ]
    memory = memory_in(trained.module)
    if memory is not None:
        limits.append(
            f"The files contain features and labels of {len(memory.labels)} training samples of {alice}, by which the "
            "model predicts: sharing a file shares information on each of these samples. Features are the inputs of "
            "the last linear layer; of a linear model they are the samples themselves."
        )
    if trained.classes:
        limits.append("It always predicts one of its classes, also for a sample that belongs to none of them.")
    if trained.preprocessing:
        limits.append("Prediction rejects categories that are not in the training data and tables that lack a column.")
    if run.provenance.get("data_verified") is False:
        limits.append("The data is not the official one, or could not be verified.")
    return limits + [f"Note from before training: {note}." for note in run.provenance.get("notes", [])]
