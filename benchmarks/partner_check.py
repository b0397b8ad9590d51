"""Check the recommendations of `waffle decide` by models that share no training code with them.

    python -m benchmarks.partner_check DATA=DECISION ...

DATA is a folder of user data and DECISION the folder that `waffle decide DATA --out DECISION` wrote. Its lines replace
those of the same data in results/partner-check.jsonl, and the table of docs/decision.md is written. For each agent, a
pooled model of every coalition is scored on the agent's rows that are not test rows, by four-fold cross-validation. The
judges are logistic regression of scikit-learn for tables (repeated five times), and for images a support vector machine
and a small CNN in plain PyTorch. The rule was written before the first run. A recommendation is

confirmed      if the judge's score of the recommended coalition is at most one standard error below those of training
               alone and of all agents,
contradicted   if one of them is more than two standard errors above it,
undecided      otherwise.

The standard error is that of the mean difference over the agent's rows.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor

from benchmarks.doc_tables import write_between
from benchmarks.references import trained_cnn
from waffle_fl.config import RunConfig, Settings
from waffle_fl.decision.coalitions import FOLDS, rows_of
from waffle_fl.decision.partners import Advice, PartnerStudy
from waffle_fl.decision.shapley import Coalition, coalitions_of, evaluate, exact
from waffle_fl.experiment import Runtime, all_alices_of
from waffle_fl.federation import Federation
from waffle_fl.records import read_json

Predict: TypeAlias = Callable[[Tensor], NDArray[np.int64]]
Shares: TypeAlias = NDArray[np.float64]  # per row, how often it is predicted rightly while held out
RECORD, PAGE = Path("results/partner-check.jsonl"), Path("docs/decision.md")
REPEATS = {"logistic regression": 5}  # of the cross-validation; other judges once


def fitted(judge: str, x: Tensor, y: Tensor, classes: int) -> Predict:
    """Train the judge and return its prediction."""
    if judge == "CNN":
        net = trained_cnn(x, y, classes)
        return lambda rows: net(rows).argmax(dim=1).numpy()
    model = LogisticRegression(C=0.1, max_iter=1000) if judge == "logistic regression" else SVC(C=10.0)
    pipeline = make_pipeline(StandardScaler(), model).fit(x.flatten(1).numpy(), y.numpy())
    return lambda rows: np.asarray(pipeline.predict(rows.flatten(1).numpy()))


def held_out(judge: str, federation: Federation) -> dict[tuple[Coalition, int], Shares]:
    """Return the judge's shares for every coalition and member. In fold k every member holds out its k-th part."""
    agents = range(federation.agents)
    data = {i: (federation.x[rows_of(federation, i)], federation.labels(i, rows_of(federation, i))) for i in agents}
    coalitions = sorted({c for i in agents for c in coalitions_of(i, agents)}, key=sorted)
    shares = {(c, i): np.zeros(len(data[i][1])) for c in coalitions for i in c}
    repeats = REPEATS.get(judge, 1)
    for repeat in range(repeats):
        cut = StratifiedKFold(FOLDS, shuffle=True, random_state=repeat)
        folds = {i: list(cut.split(np.zeros(len(y)), y.numpy())) for i, (_, y) in data.items()}
        for c in coalitions:
            for k in range(FOLDS):
                kept = [(x[folds[i][k][0]], y[folds[i][k][0]]) for i, (x, y) in data.items() if i in c]
                xs, ys = zip(*kept, strict=True)
                predict = fitted(judge, torch.cat(xs), torch.cat(ys), federation.outputs)
                for i in c:
                    held = folds[i][k][1]
                    with torch.no_grad():
                        shares[c, i][held] += (predict(data[i][0][held]) == data[i][1][held].numpy()) / repeats
    return shares


def lead(ours: Shares, theirs: Shares) -> tuple[float, float]:
    """Return the mean difference in points and its standard error over rows."""
    difference = 100 * (ours - theirs)
    return float(difference.mean()), float(difference.std(ddof=1) / sqrt(len(difference)))


def verdict(leads: Sequence[tuple[float, float]]) -> str:
    if any(value < -2 * error for value, error in leads):
        return "contradicted"
    return "confirmed" if all(value >= -error for value, error in leads) else "undecided"


def check(
    names: Sequence[str], alice: int, advice: Advice, shares: Mapping[tuple[Coalition, int], Shares]
) -> dict[str, Any]:
    """Return the recommendation for an agent beside a judge's scores."""
    agents = list(range(len(names)))
    alone, everyone = Coalition([alice]), Coalition(agents)
    group = Coalition([alice, *(names.index(partner) for partner in advice.partners)])
    recommended = group if advice.join else alone
    leads = {
        name: lead(shares[recommended, alice], shares[other, alice])
        for name, other in (("alone", alone), ("all", everyone))
    }
    values = {c: 100 * float(shares[c, alice].mean()) for c in coalitions_of(alice, agents)}
    contributions = {names[partner]: evaluate(one, values) for partner, one in exact(alice, agents).items()}
    return {
        "agent": names[alice],
        "rows": len(shares[alone, alice]),
        "recommended": list(advice.partners) if advice.join else [],
        "score": round(values[recommended], 2),
        "lead over": {rival: [round(value, 2) for value in found] for rival, found in leads.items()},
        "verdict": verdict(list(leads.values())),
        "contributions": {  # of waffle decide, of the judge
            partner: [round(100 * advice.contributions[partner].value, 2), round(value, 2)]
            for partner, value in contributions.items()
        },
    }


def settings_of(decision: Path, data: str) -> Settings:
    """Return the settings that a decision read the data with."""
    config = next(read_json(path) for path in sorted(decision.glob("*/config.json")))
    return replace(RunConfig.from_json(config).settings, data=data, alice="all", leave_out=())


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    head = "data | agent | recommended partners | judge | lead over alone | over all agents | verdict"
    rows = ["| --- " * 7 + "|"]
    for line in lines:
        partners = ", ".join(line["recommended"]) or "none"
        leads = " | ".join(_shown(*line["lead over"][rival]) for rival in ("alone", "all"))
        rows.append(
            f"| {line['data']} | {line['agent']} | {partners} | {line['judge']} | {leads} | {line['verdict']} |"
        )
    return "\n".join([f"| {head} |", *rows])


def _shown(value: float, error: float) -> str:
    return "the same" if value == error == 0 else f"{value:+.1f} ± {error:.1f}".replace("-", "−")


def read_record() -> list[dict[str, Any]]:
    return [json.loads(text) for text in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []


def main(pairs: Sequence[str]) -> None:
    """Write one line per judge and agent of every decision to the record, and the table of the page."""
    warnings.simplefilter("ignore")
    for data, decision in (pair.split("=") for pair in pairs):
        federation = all_alices_of(settings_of(Path(decision), data), Runtime())
        study = PartnerStudy.from_json(read_json(Path(decision) / "partners.json"))
        judges = ("logistic regression",) if len(federation.shape) == 1 else ("support vector machine", "CNN")
        made = []
        for judge in judges:
            shares = held_out(judge, federation)
            for name, advice in study.advice.items():
                line = check(federation.names, federation.names.index(name), advice, shares)
                made.append({"data": Path(data).name, "judge": judge, **line})
                print(json.dumps(made[-1]), flush=True)
        kept = [line for line in read_record() if line["data"] != Path(data).name]
        RECORD.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, *made]), encoding="utf-8")
    write_between(PAGE, "partner check", table(read_record()))


if __name__ == "__main__":
    main(sys.argv[1:])
