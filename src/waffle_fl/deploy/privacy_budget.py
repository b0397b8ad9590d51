"""A site's accountant: what its updates have cost over all runs, from its ledger, and whether it may send one more.

The ledger has one line per reply, with what the reply released. It is chained, and survives restarts. An identical
request gets identical bits, so it is counted once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waffle_fl.config import RunConfig
from waffle_fl.deploy.policy import Policy, Refused
from waffle_fl.deploy.settings_files import secret_of
from waffle_fl.deploy.site_store import Ledger
from waffle_fl.engines.private_gradients import release_of
from waffle_fl.experiment import round_settings
from waffle_fl.privacy.accounting import Release, epsilon_of, width_for
from waffle_fl.privacy.secret_draws import SecretDraws

SECRET = "noise.secret"  # random numbers of the site's noise; a reader could subtract the noise


class Spent(Refused):
    """The privacy budget is spent: the site takes no part in this round."""


@dataclass(frozen=True)
class PrivacyBudget:
    """The budget of one run's updates at one site."""

    ledger: Ledger
    policy: Policy
    config: RunConfig
    run: str
    label: str
    secret: bytes

    @classmethod
    def at(cls, folder: Path, ledger: Ledger, policy: Policy, config: RunConfig, run: str, label: str) -> PrivacyBudget:
        return cls(ledger, policy, config, run, label, secret_of(folder / SECRET))

    def draws_for(self, question: str) -> SecretDraws:
        """Return the random numbers of the reply to this question."""
        return SecretDraws(self.secret, question)

    def charge(self, question: str, samples: int, agent: int) -> dict[str, Any]:
        """Return the ledger's entry for one more update; raise `Spent` if it would cost more than is left."""
        s = round_settings(self.config.settings)
        whole = release_of(s, samples, agent)
        one = whole._replace(steps=self.config.settings.steps(samples))
        key = f"{question}/{hashlib.sha256(self.secret).hexdigest()[:16]}"  # with a new secret the reply is another one
        entry = {"key": key, "run": self.run, "course": self.label, **one._asdict()}
        if self.policy.epsilon:
            limit, delta, counted = self.policy.epsilon, self.policy.delta, self._released({})
        else:
            limit, delta = s.epsilon, s.delta
            counted = self._released({"run": self.run, "course": self.label})
        if delta * samples >= 1:
            raise Refused(f"delta in this site's site.toml: expected below 1 / {samples} rows, got {delta:g}")
        cost = epsilon_of([*{**counted, key: one}.values()], delta, width_for(limit))
        if cost > limit:
            raise Spent(f"the privacy budget of this site is spent: epsilon {limit:g} at delta {delta:g}")
        return {**entry, "spent": round(cost, 4), "delta": delta}

    def _released(self, of: Mapping[str, str]) -> dict[str, Release]:
        """Return what the ledger has of all runs, or of one, by question."""
        lines = (line["released"] for line in self.ledger.lines() if "released" in line)
        some = (line for line in lines if all(line[name] == value for name, value in of.items()))
        return {line["key"]: Release(line["rate"], line["multiplier"], line["steps"]) for line in some}
