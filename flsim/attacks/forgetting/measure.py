"""`flsim forgetting`: success of attacks on groups of canaries against the rounds since their last use, and times.

A group is all canaries of one window and configuration in all seeds of a setting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsim.attacks.forgetting import advantage, success
from flsim.attacks.forgetting.success import canary_times, forgetting_time, grid, median_time, p_after_window
from flsim.attacks.result import Result
from flsim.base.errors import InputError
from flsim.base.statistics import holm, log_rank_p, median_interval, t_interval
from flsim.measures.built_in import LOG_PERPLEXITY, RANK
from flsim.results.rows import RunResults
from flsim.results.sweeps import expanded, named_apart, read_shown
from flsim.runs.config.base import settings_of_both
from flsim.runs.folder import Run, participation
from flsim.show.table import json_rows

# Observations of canaries: a row per planted canary and evaluated round, with both arms side by side.

CONFIGURATION = {
    "p_u": "Float64",
    "p_e": "Float64",
    "copies": "Int64",  # a number that was set
    "first_round": "Int64",  # window, from 1; missing for no bound
    "last_round": "Int64",
}
GROUP = {"setting": "string", "series": "string", **CONFIGURATION}
TYPES = {
    "run": "string",  # of arm IN
    **GROUP,
    "seed": "Int64",
    "canary": "string",
    "round": "int64",  # number of completed rounds of the evaluated model
    "last_use": "Int64",  # last round in which a sharer took part
    "uses": "int64",  # how often sharers took part
    "since": "float64",  # rounds since last use; missing before it, and without any use
    "clean": "float64",  # log-perplexity in arm OUT at the window's end
    "clean_round": "Int64",  # round of that evaluation
    # In each arm: log-perplexity; calibrated score, which is clean minus log-perplexity, larger for a member; exposure
    # in bits; exact p-value of the rank, missing for text of held-out users.
    **{f"{name}_{arm}": "float64" for name in ("nats", "score", "bits", "p") for arm in ("in", "out")},
}


def observations(results: RunResults, twin: RunResults | None, took_part: pd.DataFrame) -> pd.DataFrame:
    """Return the observations, see `TYPES`, of a run of arm IN, its twin of arm OUT if any, and sharers by round."""
    planted = _configured(results)
    used = took_part.groupby("canary")["round"]
    planted["last_use"] = used.max().reindex(planted["canary"]).to_numpy(dtype="float64", na_value=np.nan)
    planted["uses"] = used.size().reindex(planted["canary"]).fillna(0).to_numpy("int64")
    measured = {arm: _measured(run) for arm, run in (("in", results), ("out", twin)) if run is not None}
    planted["clean"] = np.nan
    if twin is not None and len(clean := measured["out"]["nats"].dropna()):  # any model of arm OUT is clean
        rounds, ends = clean.index.unique("round"), planted["last_round"].fillna(results.rounds).astype("int64")
        planted["clean_round"] = ends.map(lambda end: min(rounds, key=lambda round_: (abs(round_ - end), round_)))
        planted["clean"] = clean.reindex(pd.MultiIndex.from_frame(planted[["clean_round", "canary"]])).to_numpy()
    table = pd.DataFrame({"round": results.evaluated}).merge(planted, how="cross")
    since = table["round"] - table["last_use"]
    table["since"] = since.where(since >= 0)
    for arm, of_arm in measured.items():
        at = of_arm.reindex(pd.MultiIndex.from_frame(table[["round", "canary"]])).reset_index(drop=True)
        p = at["rank"] / (at["references"] + 1)
        table[f"p_{arm}"] = p.mask(table["is_natural"])  # natural text is more likely than random words
        table[f"bits_{arm}"], table[f"nats_{arm}"] = -np.log2(p), at["nats"]
        table[f"score_{arm}"] = table["clean"] - at["nats"]
    return table.reindex(columns=list(TYPES)).astype(TYPES)


def _measured(run: RunResults) -> pd.DataFrame:
    """Return ``rank``, ``references`` and ``nats`` by round and canary; NaN if they were not measured."""
    tables = {
        round_: pd.DataFrame(
            {
                "rank": run.of_canaries(RANK.name, round_),
                "references": run.references(round_),
                "nats": run.of_canaries(LOG_PERPLEXITY.name, round_),
            },
            index=run.roster["canary"],
            dtype="float64",
        )
        for round_ in run.evaluated
    }
    return pd.concat(tables, names=["round"])


def _configured(results: RunResults) -> pd.DataFrame:
    """Return a row for each planted canary, with its configuration."""
    roster = results.planted.reset_index(drop=True)
    planted = roster.reindex(columns=["canary", "p_u", "p_e", "first_round", "last_round"])
    planned = roster.get("planned_insertions")
    planted["copies"] = None if planned is None else planned.astype("Int64").where(planted["p_u"].isna())
    planted["is_natural"] = roster["is_natural"].astype(bool) if "is_natural" in roster else False
    return planted.assign(run=results.name, setting=results.setting, series=results.series, seed=results.seed)


# Pairs of runs: arm IN, which plants canaries, and arm OUT, its twin of the same seed, which plants no canaries.


@dataclass(frozen=True, eq=False)
class Arms:
    """The run of arm IN of one configuration and seed with its results, and those of arm OUT, if that run was named."""

    run: Run
    results: RunResults
    twin: RunResults | None


def arms_of(paths: Sequence[Path]) -> tuple[list[Arms], list[str]]:
    """Return the pairs of runs that differ only in the arm, and sentences on excluded runs; InputError without any."""
    members: dict[str, tuple[Run, RunResults]] = {}
    others: dict[str, RunResults] = {}
    notes = []
    for folder, results in read_shown(paths).items():
        run = Run.open(folder)
        if results.status == "diverged" or not results.evaluated:
            why = "diverged" if results.status == "diverged" else "was not evaluated yet"
            notes.append(f"Run {results.name} {why} and is excluded.")
        elif run.config.canaries.arm == "out":
            others[_key(run)] = results
        else:
            members[_key(run)] = run, results
    notes += [
        f"Run {run.name} is of arm OUT, and its arm IN is missing; name both."
        for key, run in others.items()
        if key not in members
    ]
    if not members:
        names = ", ".join(map(str, paths))
        raise InputError(
            f'{names}: there is no evaluated run with canaries.arm = "in"; name such a run, and its twin with "out"'
        )
    return [Arms(run, results, others.get(key)) for key, (run, results) in members.items()], notes


def _key(run: Run) -> str:
    """Return a digest that both arms of a seed share."""
    return settings_of_both(run.config) + run.corpus.digest


ALPHA = 0.6
HARDNESS = ("easy", "medium", "hard")
KEYS = {**GROUP, "hardness": "string"}
ENDS = ("_low", "_high", "_seeds_low", "_seeds_high")
MEASURED = {
    **dict.fromkeys((f"bits_{arm}{end}" for arm in ("in", "out") for end in ("", *ENDS)), "Float64"),
    **dict.fromkeys(("success", "success_upper"), "Float64"),
    "trials": "Int64",
    **dict.fromkeys(("precision", "precision_low", "precision_high"), "Float64"),
    **dict.fromkeys(("tpr", "tpr_low", "tpr_high", "fpr", "heuristic_epsilon"), "Float64"),
}
SUCCESS = {"group": "int64", **KEYS, "k": "int64", "canaries": "int64", "seeds": "int64", **MEASURED}
TIMES = {
    "group": "int64",
    **KEYS,
    "canaries": "int64",
    "seeds": "int64",
    "never_used": "int64",
    "k_max": "Int64",
    "alpha": "float64",
    "time": "Int64",
    "is_censored": "boolean",
    "least_alpha": "Float64",
    "median_time": "Int64",
    "median_is_censored": "boolean",
    "forgotten": "Int64",
    **dict.fromkeys(advantage.OF_GROUP, "Float64"),
}
TESTS = {"group_a": "int64", "group_b": "int64", "differs": "string", "n_a": "int64", "n_b": "int64"} | dict.fromkeys(
    ("p", "p_holm", *advantage.OF_PAIR), "Float64"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Forgetting(Result):
    """The result of `flsim forgetting`.

    Attributes:
        frame: the success of attacks, a row per group and k, with the columns of `SUCCESS`.
        observations: a row per planted canary and evaluated round, with the columns of `TYPES`, and `group`.
        times: a row per group, with the columns of `TIMES`: T(alpha) as ``time``, missing and ``is_censored`` if it was
            not reached by ``k_max``, and both missing without arm OUT. ``advantage`` and its remaining share ``left``
            are those of `flsim.attacks.forgetting.advantage`. ``median_time`` counts rounds since the window's end.
            ``forgotten`` is the number of canaries with uncensored times; see `flsim.attacks.forgetting.success`.
        tests: a row for each two groups that differ in one thing, with the log-rank test of their canaries' times, and
            the remaining share in a minus that in b. Times are those of the evaluations that both groups have at equal
            numbers of rounds since the window's end; p is missing if there are none.
        notes: sentences on missing statements.
    """

    observations: pd.DataFrame
    times: pd.DataFrame
    tests: pd.DataFrame

    @property
    def success(self) -> pd.DataFrame:
        return self.frame

    def windows(self) -> list[pd.DataFrame]:
        keys = ["series", "first_round", "last_round"]
        return [table for _, table in self.observations.groupby(keys, sort=False, dropna=False)]

    def to_json(self) -> dict[str, Any]:
        """Return the rows of ``success``, ``times`` and ``tests``, and the ``notes``; unknown values are None."""
        tables = {name: json_rows(getattr(self, name)) for name in ("success", "times", "tests")}
        return tables | {"notes": list(self.notes)}


def measure_forgetting(
    *runs: Path | str, alpha: float = ALPHA, by_hardness: bool = False, pool: bool = False
) -> Forgetting:
    """Measure how fast runs forget canaries after their last use, like `flsim forgetting`.

    Args:
        runs: run folders and folders of sweeps, of arms IN and OUT; or folders that hold some.
        alpha: the accuracy that counts as forgotten, above one half.
        by_hardness: whether to divide canaries into thirds by their log-perplexity in arm OUT.
        pool: whether canaries of all numbers of copies are one group.

    Raises:
        InputError: alpha is not between 0.5 and 1, a folder is not a run, or there is no evaluated run of arm IN.

    Examples:
        >>> flsim.measure_forgetting("runs/forgetting-smoke").times                    # doctest: +SKIP
    """
    if not 0.5 < alpha < 1:
        raise InputError(f"alpha must be above 0.5, which is chance, and below 1, found {alpha:g}")
    pairs, notes = arms_of(expanded(runs))
    names = named_apart(arms.run.path for arms in pairs)
    tables = [
        observations(arms.results, arms.twin, participation(arms.run, arms.results.evaluation())).assign(
            run=str(arms.run.path), **names[arms.run.path]
        )
        for arms in pairs
    ]
    lonely = [arms.results.name for arms in pairs if arms.twin is None]
    if lonely:
        notes.append(
            f'Without arm OUT (canaries.arm = "out") accuracy, precision, T(alpha) and hardness of '
            f"{', '.join(lonely)} are missing; only exposure and ranks are available."
        )
    if any(arms.run.config.canaries.source == "heldout" for arms in pairs):
        notes.append(
            "Text of held-out users is likelier than random words in any model. Compare the bits of arm IN "
            "with the bits of arm OUT; times by rank are not available."
        )
    observed = pd.concat(tables, ignore_index=True)
    return measure(observed, alpha=alpha, by_hardness=by_hardness, pool=pool, notes=notes)


def measure(
    observed: pd.DataFrame,
    alpha: float = ALPHA,
    by_hardness: bool = False,
    pool: bool = False,
    notes: Sequence[str] = (),
) -> Forgetting:
    if observed.empty:
        raise InputError("no canary was planted in these runs; set [canaries] and train again")
    observed = observed.reset_index(drop=True)
    observed = observed.assign(hardness=_hardness(observed) if by_hardness else None).astype({"hardness": "string"})
    if by_hardness:
        place = observed["hardness"].map({name: index for index, name in enumerate(HARDNESS)})
        observed = observed.iloc[np.argsort(place.fillna(len(HARDNESS)), kind="stable")]
    if pool:
        observed = observed.assign(p_u=None, p_e=None, copies=None).astype(CONFIGURATION)
    observed["group"] = observed.groupby(list(KEYS), sort=False, dropna=False).ngroup()
    rows, times = list[dict[str, Any]](), list[dict[str, Any]]()
    ranks, advantages = list[pd.DataFrame](), list[pd.DataFrame]()
    for group, table in observed.groupby("group"):
        keys = {"group": group} | {name: table[name].iloc[0] for name in KEYS}
        ranks.append(p_after_window(table))
        measured, columns = _group(table, alpha)
        rows += [keys | row for row in measured]
        advantages.append(advantage.by_seed(table))
        of_canaries = canary_times(ranks[-1])
        middle = median_time(of_canaries)
        columns |= {
            "median_time": None if middle is None else middle.rounds,
            "median_is_censored": None if middle is None else middle.is_censored,
            "forgotten": sum(not time.is_censored for time in of_canaries),
        }
        times.append(keys | columns | advantage.of_group(advantages[-1]))
    summary = pd.DataFrame(times).reindex(columns=list(TIMES)).astype(TIMES)
    return Forgetting(
        frame=pd.DataFrame(rows).reindex(columns=list(SUCCESS)).astype(SUCCESS),
        observations=observed,
        times=summary,
        tests=_tests(summary, ranks, advantages),
        notes=(*notes, *_limits(summary, alpha)),
    )


def _limits(times: pd.DataFrame, alpha: float) -> Iterator[str]:
    """Yield sentences on groups that are too small, and on canaries without a participating sharer."""
    if few := int((times["least_alpha"] > alpha).sum()):
        yield (
            f"In {few} of {len(times)} groups, there are too few canaries to show an alpha of {alpha:g} at an "
            "accuracy of one half. Plant more canaries, train more seeds, pool all numbers of copies, or set "
            "a larger alpha."
        )
    if never := int(times["never_used"].sum()):
        yield (f"No sharer took part for {never:,} of {int(times['canaries'].sum()):,} canaries, which are excluded.")


def _hardness(observed: pd.DataFrame) -> "pd.Series[str]":
    """Return the third of each canary's log-perplexity in arm OUT; in arm IN, memorized canaries have a low one."""
    among = observed.groupby(["series", "seed", "first_round", "last_round"], dropna=False)["clean"]
    share = among.rank(method="dense", pct=True)  # all rows of a canary have the same value
    names = np.array(HARDNESS, object)[np.ceil(share.fillna(1) * len(HARDNESS)).astype("int64").clip(1, None) - 1]
    return pd.Series(names, index=observed.index).where(share.notna())


def _group(table: pd.DataFrame, alpha: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    at, longest = by_k(table.assign(chooses=success.halves(table)))
    rows = [{"k": k} | _success(of_k) for k, of_k in at]
    total = table.groupby(["run", "canary"]).ngroups
    has_twin = bool(table["score_out"].notna().any())
    of_half = [row for row in rows if 2 * row["canaries"] >= total]
    time = forgetting_time([row["k"] for row in of_half], [row["success_upper"] for row in of_half], alpha)
    columns = {
        "canaries": total,
        "seeds": table["run"].nunique(),
        "never_used": int(table[table["last_use"].isna()].groupby(["run", "canary"]).ngroups),
        "k_max": longest,
        "alpha": alpha,
        "time": time,
        "is_censored": time is None if has_twin and of_half else None,
        "least_alpha": success.least_alpha(2 * (total // 2)) if has_twin else None,
    }
    return rows, columns


def by_k(table: pd.DataFrame) -> tuple[list[tuple[int, pd.DataFrame]], int | None]:
    """Return each evaluated k with its observations, a row per canary, and the last k; ([], None) without any use.

    The last k is the largest one at or after which at least half of the canaries were evaluated. An evaluation counts
    at the first k that is not below its rounds since last use; if a canary has several at one k, only the last counts.
    """
    last = np.sort(table.groupby(["run", "canary"])["since"].max().dropna())
    if not len(last):
        return [], None
    longest = int(last[(len(last) - 1) // 2])
    used = table[table["since"] <= longest].sort_values(["seed", "run", "canary", "round"])
    ks = np.array(grid(longest))
    at = used.assign(k=ks[np.searchsorted(ks, used["since"])])
    at = at.drop_duplicates(["run", "canary", "k"], keep="last")
    return [(int(str(k)), of_k) for k, of_k in at.groupby("k")], longest


def exposure(table: pd.DataFrame, arm: str) -> dict[str, float]:
    """Return the median exposure of an arm with its intervals over canaries and over seeds, by the names in `ENDS`."""
    values = table[["run", f"bits_{arm}"]].dropna()
    medians = values.groupby("run")[f"bits_{arm}"].median().to_numpy("float64")
    median, *ends = median_interval(values[f"bits_{arm}"].to_numpy("float64"))
    return dict(zip(("", *ENDS), (median, *ends, *t_interval(medians)), strict=True))


def curve(table: pd.DataFrame, arm: str) -> list[tuple[float, float, float, float]]:
    """Return k, exposure and its 95% interval, over seeds or, for one seed, canaries; empty if it was not measured."""
    points = []
    for k, of_k in by_k(table)[0]:
        values = exposure(of_k, arm)
        low, high = values["_seeds_low"], values["_seeds_high"]
        has_seeds = np.isfinite(low)
        middle = (low + high) / 2 if has_seeds else values[""]
        if np.isfinite(middle):
            points.append((float(k), middle, *((low, high) if has_seeds else (values["_low"], values["_high"]))))
    return points


def _success(table: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {"canaries": len(table), "seeds": table["run"].nunique()}
    for arm in ("in", "out"):
        row |= {f"bits_{arm}{end}": value for end, value in exposure(table, arm).items()}
    both = table.dropna(subset=["score_in", "score_out"])
    members, others = both["score_in"].to_numpy("float64"), both["score_out"].to_numpy("float64")
    measured = success.accuracy(members, others, both["chooses"].to_numpy(bool))
    row |= dict(zip(("success", "success_upper", "trials"), measured, strict=True))
    if (at := success.at_level(members, others)) is not None:
        precision = success.precision_at(at, len(members), len(others))
        row |= dict(zip(("precision", "precision_low", "precision_high"), precision, strict=True))
        row |= {"tpr": at.tpr, "tpr_low": at.low, "tpr_high": at.high, "fpr": at.alarms / len(others)}
        row["heuristic_epsilon"] = success.heuristic_epsilon(at, len(others))
    return row


def _tests(times: pd.DataFrame, ranks: Sequence[pd.DataFrame], advantages: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the log-rank tests, at common numbers of rounds, and remaining shares of pairs of groups."""
    rows = []
    for a, b, differs in _pairs(times):
        common = ranks[a].columns.intersection(ranks[b].columns)
        of_a, of_b = (canary_times(ranks[group][common]) for group in (a, b))
        row: dict[str, Any] = {"group_a": a, "group_b": b, "differs": differs, "n_a": len(of_a), "n_b": len(of_b)}
        rows.append({**row, "p": log_rank_p(of_a, of_b), **advantage.of_pair(advantages[a], advantages[b])})
    table = pd.DataFrame(rows).reindex(columns=list(TESTS))
    return table.assign(p_holm=holm(table["p"].astype("float64").tolist())).astype(TESTS)


def _pairs(times: pd.DataFrame) -> Iterator[tuple[int, int, str]]:
    parts = {
        "setting": ["series"],
        "window": ["first_round", "last_round"],
        "copies": ["p_u", "p_e", "copies"],
        "hardness": ["hardness"],
    }
    texts = {name: times[columns].astype("string").fillna("").agg(" ".join, axis=1) for name, columns in parts.items()}
    for a, b in combinations(range(len(times)), 2):
        differing = [name for name, text in texts.items() if text[a] != text[b]]
        if len(differing) == 1:
            yield a, b, differing[0]
