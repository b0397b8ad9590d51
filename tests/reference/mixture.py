"""Reference for the mixture of predictions of waffle, in plain loops, from docs/algorithms/waffle.md."""

import math

from torch import Tensor


def em(likelihoods: list[list[float]], prior: list[float], rounds: int) -> list[float]:
    """Return the weights of parts: likelihoods[k][n] is the probability of sample n's label under part k."""
    parts = range(len(prior))
    weights = [1 / len(prior) for _ in parts]
    for _ in range(rounds):
        counts = list(prior)
        for n in range(len(likelihoods[0])):
            shares = [weights[k] * likelihoods[k][n] for k in parts]
            for k in parts:
                counts[k] += shares[k] / sum(shares)
        weights = [count / sum(counts) for count in counts]
    return weights


def projected_descent(values: list[list[float]], targets: list[float], prior: list[float], steps: int) -> list[float]:
    """Return the weights of predicted numbers by gradient descent, each step projected onto the simplex."""
    parts, samples = range(len(prior)), range(len(targets))
    errors = [[values[k][n] - targets[n] for n in samples] for k in parts]
    pull = sum(prior) * min(sum(e * e for e in row) / len(row) for row in errors)
    centre = [count / sum(prior) for count in prior]
    step = 1 / (2 * (pull + sum(e * e for row in errors for e in row)))
    weights = list(centre)
    for _ in range(steps):
        rest = [sum(weights[k] * errors[k][n] for k in parts) for n in samples]
        slopes = [2 * sum(errors[k][n] * rest[n] for n in samples) + 2 * pull * (weights[k] - centre[k]) for k in parts]
        weights = onto_simplex([weights[k] - step * slopes[k] for k in parts])
    return weights


def onto_simplex(point: list[float]) -> list[float]:
    """Return the nearest non-negative point of sum 1."""
    ordered, shift = sorted(point, reverse=True), 0.0
    for count in range(1, len(point) + 1):
        candidate = (sum(ordered[:count]) - 1) / count
        if ordered[count - 1] > candidate:
            shift = candidate
    return [max(value - shift, 0.0) for value in point]


def softmax(output: Tensor) -> list[float]:
    powers = [math.exp(float(value)) for value in output]
    return [power / sum(powers) for power in powers]
