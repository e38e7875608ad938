"""Tables of runs that `experiments/local_runs.py` trained, as CSV files in experiments/results.

    python -m experiments.summaries ten-times                    # from results/ten-times.parquet
    python -m experiments.summaries table1-edge                  # from results/table1-search.parquet
    python -m experiments.summaries table1 runs/table1           # from run folders
    python -m experiments.summaries dp-small runs/gpu
    python -m experiments.summaries once runs/once
    python -m experiments.summaries layers runs/layers

Differences are paired by seed. Intervals are 95% intervals of Student's t over seeds, and p is of the paired t test.
`python .ci/result_tables.py` then writes the tables into the pages.
"""

import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

import flsim
from experiments.local_runs import chosen
from flsim.base.statistics import holm, paired_t_p, share_interval, t_interval

RESULTS = Path(__file__).parent / "results"
Cells = dict[str, str]


def with_interval(name: str, values: "pd.Series[float]", digits: int = 2) -> Cells:
    """Return the mean over seeds and its interval as cells NAME, NAME_low and NAME_high."""
    numbers = values.dropna().to_numpy()
    low, high = t_interval(numbers)
    cells = zip(("", "_low", "_high"), (numbers.mean() if len(numbers) else math.nan, low, high), strict=True)
    return {f"{name}{end}": "" if math.isnan(value) else f"{value:.{digits}f}" for end, value in cells}


def by_seed(frame: pd.DataFrame, keys: list[str], column: str) -> dict[Any, "pd.Series[float]"]:
    """Return a column's values by seed, for each group of rows."""
    return {key: group.set_index("seed")[column].astype(float) for key, group in frame.groupby(keys)}


def p_of(values: "pd.Series[float]") -> float:
    return paired_t_p(values.dropna().to_numpy())


def write(name: str, rows: list[Cells]) -> None:
    """Write a table, with empty cells for columns that a row lacks."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (RESULTS / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def final_rows(folders: Iterable[str], prefix: str) -> pd.DataFrame:
    """Return the final row of each run whose name begins with `prefix`; `group` and `share` are parts of its name."""
    runs, _ = flsim.frames(*[str(path) for folder in folders for path in Path(folder).glob(f"{prefix}*/")])
    return runs[runs["is_final"] | (runs["round"] == runs.groupby("run")["round"].transform("max"))]


def ten_times(_: list[str]) -> None:
    """Write the settings and the differences of the runs at ten times the scale."""
    measured = pd.read_parquet(RESULTS / "ten-times.parquet")
    keys = ["partition", "learning_rate", "round"]
    means = measured.groupby([*keys, "seed", "metric"])["value"].mean().unstack("metric")
    settings: list[Cells] = []
    for (partition, rate, round_), group in means.groupby(keys):
        found = {"setting": f"{'IID' if partition == 'iid' else 'non-IID'} at {rate}, {round_} rounds"}
        found["seeds"] = str(len(group))
        found |= {f"{name}_percent": f"{100 * group[name].mean():.0f}" for name in ("rs", "bs")}
        found |= {name: f"{group[name].mean():.1f}" for name in ("exposure", "space_exposure", "perplexity")}
        settings.append({name: "" if value == "nan" else value for name, value in found.items()})
    write("ten-times", settings)
    compared = [
        ("0.3 and 0.2, both after 471 rounds (6 epochs)", 0.3, 471, 471),
        ("0.3 and 0.2, both after 628 rounds (8 epochs)", 0.3, 628, 628),
        ("0.3 after 471 rounds, 0.2 after 628", 0.3, 471, 628),
        ("0.19 and 0.2, both after 628 rounds", 0.19, 628, 628),
    ]
    of_runs = means.reset_index()
    values = {name: by_seed(of_runs, keys, name) for name in ("exposure", "space_exposure", "perplexity", "rs", "bs")}
    differences = []
    for name, rate, iid_round, non_iid_round in compared:
        pair = ("iid", rate, iid_round), ("non-iid", 0.2, non_iid_round)
        delta = {quantity: found[pair[0]] - found[pair[1]] for quantity, found in values.items()}
        row = {"comparison": name, **with_interval("difference", delta["exposure"])}
        row |= {"difference_p": f"{p_of(delta['exposure']):.1g}", "seeds": str(delta["exposure"].count())}
        differences.append(row)
    write("ten-times-differences", differences)
    # The last comparison, in other quantities.
    equal = [("perplexity", "perplexity", 1, 1.0), ("exposure among all phrases, bits", "space_exposure", 1, 1.0)]
    equal += [("RS, percentage points", "rs", 0, 100.0), ("BS, percentage points", "bs", 0, 100.0)]
    rows = [
        {"quantity": name, **with_interval("iid_minus_non_iid", scale * delta[quantity], digits)}
        for name, quantity, digits, scale in equal
    ]
    write("ten-times-equal", rows)


def table1_edge(folders: list[str]) -> None:
    """Write the search near the edge of stability: as stored, or of a folder of runs, which is then stored."""
    stored = RESULTS / "table1-search.parquet"
    if folders:
        searched = [outcome for outcome in _outcomes(folders) if outcome["is_search"]]
        rows = [{**outcome["facts"], "perplexity": outcome["perplexity"]} for outcome in searched]
        pd.DataFrame(rows).dropna().to_parquet(stored, index=False)
    frame = pd.read_parquet(stored)
    tried: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, rate, perplexity in zip(frame["group"], frame["rate"], frame["perplexity"], strict=True):
        tried[str(group)][float(rate)].append(float(perplexity))
    table: list[Cells] = []
    for group, by_rate in tried.items():
        stable = max(rate for rate, found in by_rate.items() if math.isfinite(sum(found)))
        above = by_rate[min(rate for rate in by_rate if rate > stable)]
        table.append(
            {
                "setting": _setting(group),
                "highest_stable": f"{stable:g}",
                "stable_perplexity": f"{sum(by_rate[stable]) / len(by_rate[stable]):.1f}",
                "diverged_above": f"{sum(map(math.isinf, above))} of {len(above)}",
                "chosen_rate": f"{chosen(by_rate):.3g}",
            }
        )
    write("table1-edge", table)


def _outcomes(folders: list[str]) -> list[dict[str, Any]]:
    files = [(Path(folder) / "outcomes.json").read_text(encoding="utf-8") for folder in folders]
    return [outcome for text in files for outcome in json.loads(text)["outcomes"]]


def table1(folders: list[str]) -> None:
    """Write the differences of seeds 10 to 19 at the chosen learning rates and at half of them."""
    outcomes = _outcomes(folders)
    groups = list(dict.fromkeys(outcome["facts"]["group"] for outcome in outcomes))
    runs = final_rows(folders, "table1-")
    parts = runs["run"].str.extract(r"table1-(?P<group>.+)-(?P<share>half|chosen)-seed\d+")
    runs = runs.assign(group=parts["group"], share=parts["share"])
    failed = pd.DataFrame(
        [
            {**outcome["facts"], "status": outcome["status"]}
            for outcome in outcomes
            if not outcome["is_search"] and outcome["status"] == "diverged"
        ]
    )
    quantities = ("mean_exposure", "mean_space_exposure", "perplexity")
    values = {quantity: by_seed(runs, ["group", "share"], quantity) for quantity in quantities}
    settings: list[Cells] = []
    for group in groups:
        row = {"setting": _setting(group)}
        for share in ("chosen", "half"):
            exposures = values["mean_exposure"][group, share]
            row |= {f"{share}_diverged": str(_diverged(failed, group, share)), f"{share}_seeds": str(len(exposures))}
            row |= {f"{share}_exposure": f"{exposures.mean():.1f}"}
            row |= {f"{share}_perplexity": f"{values['perplexity'][group, share].mean():.1f}"}
        settings.append(row)
    write("table1-new-settings", settings)

    partitions = [
        (group, group.replace("-iid-", "-non-iid-")) for group in groups if "-iid-" in group and "non" not in group
    ]
    techniques = [
        (f"fedavg-iid-cohort{cohort}", f"sgd-iid-batch_size{batch}")
        for cohort, batch in ((4, 16), (8, 32), (16, 64), (40, 128))
    ]
    for name, pairs in (("partitions", partitions), ("techniques", techniques)):
        rows: list[Cells] = []
        for a, b in pairs:
            label = _setting(a).replace("IID ", "") if name == "partitions" else f"{_setting(a)} minus {_setting(b)}"
            row = {"setting": label}
            for share in ("chosen", "half"):
                delta = {quantity: found[a, share] - found[b, share] for quantity, found in values.items()}
                row |= with_interval(share, delta["mean_exposure"])
                row |= {f"{share}_p": f"{p_of(delta['mean_exposure'])}"}
                row |= {f"{share}_seeds": str(delta["mean_exposure"].count())}
                row |= with_interval(f"{share}_space", delta["mean_space_exposure"], 1)
                row |= with_interval(f"{share}_perplexity", delta["perplexity"], 1)
            rows.append(row)
        for share in ("chosen", "half"):
            families = [range(0, 4), range(4, 8)] if name == "partitions" else [range(4)]
            for family in families:
                corrected = holm([float(rows[index][f"{share}_p"]) for index in family])
                for index, p in zip(family, corrected, strict=True):
                    rows[index][f"{share}_p"] = f"{p:.1g}"
        write(f"table1-new-{name}", rows)


def _setting(group: str) -> str:
    technique, _, rest = group.partition("-")
    partition = "non-IID" if rest.startswith("non") else "IID"
    size = "".join(character for character in rest if character.isdigit())
    return f"{partition} {'SGD' if technique == 'sgd' else 'FedAvg'} {size}"


def _diverged(failed: pd.DataFrame, group: str, share: str) -> int:
    if failed.empty:
        return 0
    return int(((failed["group"] == group) & (failed["share"] == {"half": 0.5, "chosen": 1.0}[share])).sum())


def dp_small(folders: list[str]) -> None:
    """Write the settings of `dp-small.toml` over seeds, and the differences between them."""
    runs = final_rows(folders, "dp-small-")
    runs = runs.assign(setting=runs["run"].str.extract(r"dp-small-(\w+)-seed")[0])
    names = {"none": "FedAvg", "clip": "clip, S = 0.3", "dp": "clip and noise, z = 1"}
    quantities = {"exposure": "mean_exposure", "perplexity": "perplexity", "rs": "rs", "bs": "bs"}
    values = {name: by_seed(runs, ["setting"], column) for name, column in quantities.items()}
    trained = [setting for setting in names if len(values["rs"].get((setting,), ())) > 1]
    rows = []
    for setting in trained:
        found = {name: of[(setting,)] for name, of in values.items()}
        row = {"setting": names[setting], "seeds": str(len(found["rs"]))}
        row |= {name: f"{found[name].mean():.1f}" for name in ("rs", "bs")}
        rows.append(
            row | with_interval("exposure", found["exposure"]) | with_interval("perplexity", found["perplexity"], 1)
        )
    write("dp-seeds", rows)
    differences = []
    for a, b in pairwise(trained):
        row = {"difference": f"{names[b]} minus {names[a]}"}
        for name in ("exposure", "perplexity", "rs", "bs"):
            delta = values[name][(b,)] - values[name][(a,)]
            row |= with_interval(name, delta) | {f"{name}_p": f"{p_of(delta):.1g}", "seeds": str(delta.count())}
        differences.append(row)
    write("dp-seeds-differences", differences)


def once(folders: list[str]) -> None:
    """Write in how many new networks a secret that was read once is likelier than another number."""
    runs = final_rows(folders, "secret-sharer-once-")
    networks, preferred = len(runs), int(runs["rs"].sum())
    low, high = share_interval(preferred, networks)
    p = stats.binomtest(preferred, networks).pvalue
    cells = {"tier": "small, seeds 101 to 400", "networks": str(networks), "preferred": str(preferred)}
    share = {
        "share": f"{100 * preferred / networks:.0f}",
        "share_low": f"{100 * low:.0f}",
        "share_high": f"{100 * high:.0f}",
    }
    write("secret-sharer-once-new", [{**cells, **share, "p": f"{p:.2g}", "interval_over": "networks"}])


def layers(folders: list[str]) -> None:
    """Write the differences in exposure between networks of two layers and of one, over new seeds."""
    runs = final_rows(folders, "secret-sharer-table1-")
    runs = runs.assign(network=runs["run"].str.extract(r"recurrent-(\w+-layers\d)")[0])
    exposure = by_seed(runs, ["network"], "mean_exposure")
    rows = []
    for kind in ("gru", "lstm"):
        delta = exposure[(f"{kind}-layers2",)] - exposure[(f"{kind}-layers1",)]
        row = {"difference": f"{kind.upper()}, two layers minus one", "seeds": str(delta.count())}
        rows.append(row | with_interval("exposure", delta) | {"exposure_p": f"{p_of(delta):.1g}"})
    write("secret-sharer-layers", rows)


SUMMARIES: dict[str, Callable[[list[str]], Any]] = {
    "ten-times": ten_times,
    "table1-edge": table1_edge,
    "table1": table1,
    "dp-small": dp_small,
    "once": once,
    "layers": layers,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SUMMARIES:
        sys.exit(f"usage: python -m experiments.summaries {{{','.join(SUMMARIES)}}} [RUNS ...]")
    SUMMARIES[sys.argv[1]](sys.argv[2:])
