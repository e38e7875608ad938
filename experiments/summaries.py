"""Tables of runs that `experiments/local_runs.py` trained, as CSV files in experiments/results.

    python -m experiments.summaries ten-times                    # from results/ten-times.parquet
    python -m experiments.summaries table1-edge                  # from results/table1-search.parquet
    python -m experiments.summaries table1                       # from results/table1-runs.parquet
    python -m experiments.summaries table1 runs/table1           # of run folders, and stores their measurements there

The other names are in `SUMMARIES` at the end of this file; like table1, they read results/NAME.parquet, or add the
runs of folders to it.

Differences are paired by seed. Intervals are 95% intervals of Student's t over seeds, and p is of the paired t test.
`python .ci/result_tables.py` then writes the tables into the pages.
"""

import csv
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import flsim
from experiments.local_runs import chosen, stable
from flsim.attacks.audit.bounds import epsilon_of_coins, epsilon_of_ranks
from flsim.attacks.membership.shadows import collect, leave_one_out
from flsim.base.arrays import Floats
from flsim.base.rng import stream
from flsim.base.statistics import auroc, holm, paired_t_p, share_interval, t_interval
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.results.differences import pair_at_like_utility, pairs_of_seeds
from flsim.results.rows import read_run

RESULTS = Path(__file__).parent / "results"
PAPER_REFERENCES = 2_000_000  # Thakkar et al. (2020), section 3.1
# With the digits to print; shares are of planted canaries.
QUANTITIES = {
    **{"exposure": 2, "space_exposure": 1, "rs_percent": 1, "rs_2m_percent": 1, "bs_percent": 1},
    **{"perplexity": 1, "accuracy_percent": 1},
}
PARTITIONS = {"iid": "IID", "non-iid": "non-IID"}
TECHNIQUES = {"sgd": "SGD", "fedavg": "FedAvg", "clip": "clip", "dp": "clip and noise"}
OPTIMIZERS = TECHNIQUES | {"momentum": "Momentum", "adam": "Adam", "fedavg-adam": "FedAvg with Adam"}
# names of runs of Tables 3 and 4
OF_TIER_SMOKE = r"{}-(?P<technique>[a-z-]+?)-(?P<partition>iid|non-iid)(?:-[a-z_]+(?P<size>\d+))?-seed\d+"
Cells = dict[str, str]


def with_interval(name: str, values: "pd.Series[float]", digits: int = 2) -> Cells:
    """Return the mean over seeds and its interval as cells NAME, NAME_low and NAME_high."""
    numbers = values.dropna().to_numpy()
    low, high = t_interval(numbers)
    cells = zip(("", "_low", "_high"), (numbers.mean() if len(numbers) else math.nan, low, high), strict=True)
    return {f"{name}{end}": "" if math.isnan(value) else f"{value:.{digits}f}" for end, value in cells}


def p_of(values: "pd.Series[float]") -> float:
    return paired_t_p(values.dropna().to_numpy())


def write(name: str, rows: list[Cells]) -> None:
    """Write a table, with empty cells for columns that a row lacks."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (RESULTS / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rs_2m(space_exposure: "pd.Series[float]") -> "pd.Series[float]":
    """Return the probability, in percent, that RS with as many references as in the paper identifies each canary.

    A reference has a lower perplexity than a canary with probability 2^-e, and e is the canary's exposure among all
    phrases, in bits. RS identifies the canary if none of the `PAPER_REFERENCES` references has.
    """
    return space_exposure.map(lambda exposure: 100 * (1 - 2.0 ** -float(exposure)) ** PAPER_REFERENCES)


def measured(name: str, folders: list[str], pattern: str) -> pd.DataFrame:
    """Return the final measurements of runs, from results/NAME.parquet, to which runs in the folders are added first.

    Args:
        name: name of the file.
        folders: folders of run folders; empty to read the file.
        pattern: regular expression of the names of runs; its groups become columns.

    Returns:
        One row for each run: the groups of `pattern`, the seed, the number of rounds, and `QUANTITIES`: means over
        planted canaries in bits (exposure), shares in percent (RS, BS), and perplexity.
    """
    file = RESULTS / f"{name}.parquet"
    if folders:
        runs, canaries = flsim.frames(*[str(path.parent) for root in folders for path in Path(root).glob("*/run.json")])
        runs = runs[(runs["round"] == runs.groupby("run")["round"].transform("max")) & (runs["status"] == "completed")]
        runs = runs[runs["run"].str.fullmatch(pattern)]
        frame = (
            runs["run"]
            .str.extract(pattern)
            .assign(
                seed=runs["seed"],
                round=runs["round"],
                exposure=runs["mean_exposure"],
                space_exposure=runs.get("mean_space_exposure"),
                rs_percent=100 * runs["rs"] / runs["canaries"],
                rs_2m_percent=None,
                bs_percent=100 * runs["bs"] / runs["canaries"],
                perplexity=runs["perplexity"],
                accuracy_percent=100 * runs["accuracy"],
            )
        )
        if "space_exposure" in canaries:
            planted = canaries[canaries["is_planted"] & canaries["is_final"]]
            frame["rs_2m_percent"] = runs["run"].map(rs_2m(planted["space_exposure"]).groupby(planted["run"]).mean())
        if file.exists():
            keys = [*re.compile(pattern).groupindex, "seed"]
            frame = pd.concat([frame, pd.read_parquet(file)]).drop_duplicates(
                keys
            )  # a run that is measured again counts
        frame.convert_dtypes().sort_values([str(name) for name in frame]).to_parquet(file, index=False)
    return pd.read_parquet(file)


def by_seed(frame: pd.DataFrame, keys: list[str]) -> dict[Any, pd.DataFrame]:
    """Return the quantities by seed, for each group of rows."""
    return {key: group.set_index("seed") for key, group in frame.groupby(keys if len(keys) > 1 else keys[0])}


def quantities_of(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Return the quantities that were measured, with their digits."""
    return [(name, digits) for name, digits in QUANTITIES.items() if frame[name].notna().any()]


def settings(frames: Mapping[str, pd.DataFrame], column: str = "setting") -> list[Cells]:
    """Return a row for each setting: mean quantities over seeds; exposure and perplexity have intervals."""
    rows = []
    for name, frame in frames.items():
        row = {column: name, "seeds": str(len(frame))}
        for quantity, digits in quantities_of(frame):
            cells = with_interval(quantity, frame[quantity], digits)
            row |= cells if quantity in ("exposure", "perplexity") else {quantity: cells[quantity]}
        rows.append(row)
    return rows


def differences(pairs: Mapping[str, Sequence[pd.DataFrame]], column: str = "difference") -> list[Cells]:
    """Return a row for each pair: mean differences over seeds, a minus b, with intervals and p."""
    rows = []
    for name, (a, b) in pairs.items():
        delta = a[list(QUANTITIES)] - b[list(QUANTITIES)]
        row = {column: name, "seeds": str(delta["exposure"].count())}
        for quantity, digits in quantities_of(delta):
            row |= with_interval(quantity, delta[quantity], digits) | {f"{quantity}_p": f"{p_of(delta[quantity]):.1g}"}
        rows.append(row)
    return rows


def mean_of(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the mean over settings by seed; a seed that lacks one of them has no value."""
    first, *others = (frame[list(QUANTITIES)] for frame in frames)
    return sum(others, first) / len(frames)


def ten_times(_: list[str]) -> None:
    """Write the settings and the differences of the runs at ten times the scale."""
    rows = pd.read_parquet(RESULTS / "ten-times.parquet")
    space = rows[rows["metric"] == "space_exposure"]
    rows = pd.concat([rows, space.assign(metric="rs_2m_percent", value=rs_2m(space["value"]))])
    keys = ["partition", "learning_rate", "round"]
    runs = rows.groupby([*keys, "seed", "metric"])["value"].mean().unstack("metric").reset_index()
    for share in ("rs", "bs", "accuracy"):
        runs[f"{share}_percent"] = 100 * runs[share]
    groups = by_seed(runs.reindex(columns=[*keys, "seed", *QUANTITIES]), keys)
    write(
        "ten-times",
        settings(
            {f"{PARTITIONS[partition]} at {rate}, {end} rounds": g for (partition, rate, end), g in groups.items()}
        ),
    )
    compared = {
        "0.3 and 0.2, both after 471 rounds (6 epochs)": (0.3, 471, 471),
        "0.3 and 0.2, both after 628 rounds (8 epochs)": (0.3, 628, 628),
        "0.3 after 471 rounds, 0.2 after 628": (0.3, 471, 628),
        "0.19 and 0.2, both after 628 rounds": (0.19, 628, 628),
    }
    pairs = {
        name: (groups["iid", rate, iid_end], groups["non-iid", 0.2, non_iid_end])
        for name, (rate, iid_end, non_iid_end) in compared.items()
    }
    write("ten-times-differences", differences(pairs, "comparison"))


def edge(folders: list[str], name: str = "table1") -> None:
    """Write the search near the edge of stability: as stored, or of a folder of runs, which is then stored."""
    stored = RESULTS / f"{name}-search.parquet"
    if folders:
        tried_here = [one for one in _outcomes(folders) if one["is_search"] and one["facts"]["sweep"] == name]
        rows = [{**one["facts"], "perplexity": one["perplexity"]} for one in tried_here]
        pd.DataFrame(rows).drop(columns="sweep").dropna().to_parquet(stored, index=False)
    tried: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in pd.read_parquet(stored).itertuples():
        tried[str(row.group)][float(row.rate)].append(float(row.perplexity))  # type: ignore[arg-type]
    table: list[Cells] = []
    for group, by_rate in tried.items():
        highest = stable(by_rate)[-1]
        above = by_rate.get(min((rate for rate in by_rate if rate > highest), default=math.nan), [])
        table.append(
            {
                "setting": _setting(group),
                "highest_stable": f"{highest:g}",
                "stable_perplexity": f"{sum(by_rate[highest]) / len(by_rate[highest]):.1f}",
                "diverged_above": f"{sum(map(math.isinf, above))} of {len(above)}",
                "chosen_rate": f"{chosen(by_rate):.3g}",
            }
        )
    write(f"{name}-edge", table)


def _outcomes(folders: Iterable[str]) -> list[dict[str, Any]]:
    files = [(Path(folder) / "outcomes.json").read_text(encoding="utf-8") for folder in folders]
    return [outcome for text in files for outcome in json.loads(text)["outcomes"]]


def _setting(group: str) -> str:
    technique, partition, size = re.fullmatch(r"([a-z]+)-(iid|non-iid)(?:-[a-z_]+(\d+))?", group).groups("")  # type: ignore[union-attr]
    return f"{PARTITIONS[partition]} {TECHNIQUES[technique]} {size}".strip()


def at_both_rates(name: str, folders: list[str], pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Write differences between groups of runs, first minus second, at chosen learning rates and at half of them.

    Returns:
        The final measurements, as of `measured`.
    """
    runs = measured(f"{name}-runs", folders, rf"{name}-(?P<group>.+)-(?P<share>chosen|half)-seed\d+")
    rows: list[Cells] = [{} for _ in pairs]
    for share in ("chosen", "half"):
        groups = by_seed(runs[runs["share"] == share], ["group"])
        add_columns(
            rows, differences({f"{_setting(a)} minus {_setting(b)}": (groups[a], groups[b]) for a, b in pairs}), share
        )
    write(f"{name}-refined", rows)
    return runs


def add_columns(rows: list[Cells], added: list[Cells], share: str) -> None:
    """Add the first column of other rows as it is, and their further columns with the prefix of a share."""
    for row, cells in zip(rows, added, strict=True):
        label, *others = cells.items()
        row |= dict([label]) | {f"{share}_{column}": cell for column, cell in others}


def rs_beside_paper(name: str, runs: pd.DataFrame, settings: Mapping[str, str]) -> None:
    """Add RS among as many references as in the paper to NAME-settings.csv.

    Args:
        name: name of the table, such as "table3".
        runs: the final measurements, with the columns technique and partition, and with size if it varies.
        settings: the name of each technique in NAME-settings.csv.
    """
    sizes = runs["size"].astype("string").fillna("") if "size" in runs else ""
    setting = (runs["technique"].map(settings) + " " + sizes).str.strip()
    means = runs.groupby([setting, runs["partition"]])["rs_2m_percent"].mean()
    stored = Path(__file__).parent / "results" / f"{name}-settings.csv"
    with stored.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for partition in PARTITIONS:
            share = means.get((row["setting"], partition), math.nan)
            row[f"{partition.replace('-', '_')}_rs_2m_percent"] = "" if math.isnan(share) else f"{share:.1f}"
    write(f"{name}-settings", rows)


def of_tier_smoke(folders: list[str], name: str) -> None:
    """Add RS among as many references as in the paper to the settings of Table 3 or 4."""
    rs_beside_paper(name, measured(f"{name}-runs", folders, OF_TIER_SMOKE.format(name)), OPTIMIZERS)


def table3_half(folders: list[str]) -> None:
    """Write the differences between partitions and between optimizers at half of the learning rates of Table 3."""
    runs = by_seed(measured("table3-half-runs", folders, OF_TIER_SMOKE.format("table3")), ["technique", "partition"])
    pairs = {
        f"{name}, IID minus non-IID": (runs[technique, "iid"], runs[technique, "non-iid"])
        for technique, name in OPTIMIZERS.items()
        if (technique, "iid") in runs
    }
    for a, b in (("adam", "sgd"), ("momentum", "sgd"), ("fedavg-adam", "fedavg")):
        for data, partition in PARTITIONS.items():
            pairs[f"{partition}, {OPTIMIZERS[a]} minus {OPTIMIZERS[b]}"] = (runs[a, data], runs[b, data])
    write("table3-half", differences(pairs))


def table4_half(folders: list[str]) -> None:
    """Write the differences between the largest and smallest sizes at half of the learning rates of Table 4."""
    keys = ["technique", "partition", "size"]
    runs = by_seed(measured("table4-half-runs", folders, OF_TIER_SMOKE.format("table4")), keys)
    pairs: dict[str, tuple[pd.DataFrame, pd.DataFrame]] = {}
    for technique, what, sizes in (("fedavg", "cohort", ("40", "4")), ("sgd", "batch size", ("256", "32"))):
        name = f"{OPTIMIZERS[technique]}, {what} {' minus '.join(sizes)}"
        both = [mean_of([runs[technique, data, size] for data in PARTITIONS]) for size in sizes]
        pairs[name] = (both[0], both[1])
        for size in sizes:
            iid, other = (runs[technique, data, size] for data in PARTITIONS)
            pairs[f"{OPTIMIZERS[technique]} {size}, IID minus non-IID"] = (iid, other)
    write("table4-half", differences(pairs))


def table2(folders: list[str]) -> None:
    """Write the differences of three settings of Table 2 at refined learning rates, and their RS."""
    pairs = [(f"{name}-iid", f"{name}-non-iid") for name in ("fedavg", "clip", "dp")]
    pairs += [(f"clip-{data}", f"fedavg-{data}") for data in PARTITIONS]
    runs = at_both_rates("table2", folders, [*pairs, *((f"dp-{data}", f"clip-{data}") for data in PARTITIONS)])
    parts = runs["group"].str.extract(r"(?P<technique>[a-z]+)-(?P<partition>.+)")
    rs_beside_paper("table2", runs.join(parts)[runs["share"] == "chosen"], TECHNIQUES | {"fedavg": "no clip"})


def four_settings(folders: list[str]) -> None:
    """Write the differences of the four settings on synthetic text at refined learning rates."""
    pairs = [(f"{name}-iid", f"{name}-non-iid") for name in ("sgd", "fedavg")]
    at_both_rates("four-settings", folders, [*pairs, *((f"fedavg-{data}", f"sgd-{data}") for data in PARTITIONS)])


def table1(folders: list[str]) -> None:
    """Write the settings and differences of seeds from 10 on, at the chosen learning rates and at half of them."""
    runs = measured("table1-runs", folders, r"table1-(?P<group>.+)-(?P<share>chosen|half)-seed\d+")
    sizes = {"SGD": ("sgd-{}-batch_size{}", (16, 32, 64, 128)), "FedAvg": ("fedavg-{}-cohort{}", (4, 8, 16, 40))}
    paper = pd.read_csv(Path(__file__).parent / "thakkar2020.csv").query("table == 1")
    tables: dict[str, list[Cells]] = {}
    for share in ("chosen", "half"):
        groups = by_seed(runs[runs["share"] == share], ["group"])
        sides = {
            (technique, partition): [groups[name.format(partition, size)] for size in of_technique]
            for technique, (name, of_technique) in sizes.items()
            for partition in PARTITIONS
        }
        named = {
            f"{PARTITIONS[partition]} {technique} {size}": frame
            for (technique, partition), frames in sides.items()
            for size, frame in zip(sizes[technique][1], frames, strict=True)
        }
        by_table: dict[str, list[Cells]] = {"settings": settings(named), "partitions": [], "techniques": []}
        for technique, (_, of_technique) in sizes.items():
            both = zip(of_technique, sides[technique, "iid"], sides[technique, "non-iid"], strict=True)
            pairs = {f"{technique} {size}": (iid, non_iid) for size, iid, non_iid in both}
            by_table["partitions"] += family(pairs, f"{technique}, mean")
        for partition, name in PARTITIONS.items():
            order = zip(
                sizes["FedAvg"][1], sizes["SGD"][1], sides["FedAvg", partition], sides["SGD", partition], strict=True
            )
            pairs = {f"{name}, FedAvg {users} minus SGD {records}": (a, b) for users, records, a, b in order}
            by_table["techniques"] += family(pairs, f"{name}, FedAvg minus SGD, mean")
        for name, rows in by_table.items():
            add_columns(tables.setdefault(name, [{} for _ in rows]), rows, share)
    shares = [
        f"{100 * found / 90:.1f}"  # of 90 canaries, by increasing size
        for technique in sizes
        for partition in PARTITIONS
        for found in paper[(paper["optimizer"] == technique) & (paper["data"].str.lower() == partition)]["rs"]
    ]
    for row, published in zip(tables["settings"], shares, strict=True):
        row["paper_rs_percent"] = published
        row |= {name: f"=table1-edge/{row['setting']}/{name}" for name in ("highest_stable", "diverged_above")}
    for name, rows in tables.items():
        write(f"table1-{name}", rows)


def family(pairs: Mapping[str, Sequence[pd.DataFrame]], mean: str) -> list[Cells]:
    """Return the differences of four sizes, with Holm's correction of p, and the difference of their means."""
    rows = differences(pairs)
    for column in [name for name in rows[0] if name.endswith("_p")]:
        for row, p in zip(rows, holm([float(row[column]) for row in rows]), strict=True):
            row[column] = f"{p:.1g}"
    a, b = (mean_of([pair[side] for pair in pairs.values()]) for side in (0, 1))
    return [*rows, *differences({mean: (a, b)})]


def dp_small(folders: list[str]) -> None:
    """Write the settings of `dp-small.toml` over seeds, and the differences between them."""
    groups = by_seed(measured("dp-seeds", folders, r"dp-small-(?P<privacy>\w+)-seed\d+"), ["privacy"])
    names = {"none": "FedAvg", "clip": "clip, S = 0.3", "dp": "clip and noise, z = 1"}
    trained = [name for name in names if len(groups.get(name, ())) > 1]
    write("dp-seeds", settings({names[name]: groups[name] for name in trained}))
    short = {name: label.partition(",")[0] for name, label in names.items()}
    pairs = {f"{short[b]} minus {short[a]}": (groups[b], groups[a]) for a, b in pairwise(trained)}
    write("dp-seeds-differences", differences(pairs))


def dp_ftrl(folders: list[str]) -> None:
    """Write the rows of `dp-ftrl.toml` over seeds, and the differences that its directions name."""
    groups = by_seed(measured("dp-ftrl", folders, r"dp-ftrl-(?P<noise>[a-z]+)-.*seed\d+"), ["noise"])
    write("dp-ftrl", settings(groups))
    pairs = [(name, "independent") for name in ("banded", "blt", "poisson", "skellam")]
    pairs += [("amplified", "banded"), ("tree", "banded"), ("tree", "blt")]
    from_clip = [(name, "clip") for name in groups if name != "clip"]
    for table, compared in {"differences": pairs, "clip": from_clip}.items():
        named = {f"{a} minus {b}": (groups[a], groups[b]) for a, b in compared}
        write(f"dp-ftrl-{table}", differences(named))


def dp_ftrl_attacks(folders: list[str]) -> None:
    """Write the membership of users and bounds on epsilon, pooled over seeds, for the rows of `dp-ftrl.toml`.

    The folders are those of the tiers smoke, whose canaries are audited, and users.
    """
    stored = RESULTS / "dp-ftrl-attacks.parquet"
    if folders:
        audits = flsim.audit(*folders)
        tests = audits.groupby("run").agg(seed=("run", lambda run: int(run.iloc[0][-1])), refuted=("refuted", "sum"))
        columns = ["n_in", "n_out", "group", "threshold", "trials", "detected", "delta"]
        for name, method in {"canary": "epsilon", "user": "epsilon, canary users by coins"}.items():
            rows = audits[audits["method"] == method].set_index("run")[columns]
            tests = tests.join(rows.add_prefix(f"{name}_"))
        runs_of_users = sorted(path.parent for path in Path(folders[-1]).glob("*/run.json"))
        users = pd.concat(
            [flsim.infer_users(path).query("unit == 'user'").assign(run=path.name) for path in runs_of_users]
        )
        users = users.set_index("run")
        frame = tests.join(users[["auroc", "control_auroc"]]).reset_index()
        frame.insert(0, "noise", frame["run"].str.extract(r"dp-ftrl-([a-z]+)-")[0])
        frame.drop(columns="run").sort_values(["noise", "seed"]).to_parquet(stored, index=False)
    groups = by_seed(pd.read_parquet(stored), ["noise"])
    table: list[Cells] = []
    for name, runs in groups.items():
        found, planted = int(runs["canary_detected"].sum()), int(runs["canary_n_in"].sum())
        shared = np.repeat(runs["canary_group"].to_numpy("int64"), runs["canary_n_in"].to_numpy("int64")).tolist()
        threshold, references = int(runs["canary_threshold"].max()), int(runs["canary_n_out"].min())
        row = {"setting": name, "seeds": str(len(runs))} | with_interval("auroc", runs["auroc"], 3)
        row |= with_interval("minus_clip", runs["auroc"] - groups["clip"]["auroc"], 3) if name != "clip" else {}
        row |= {"control_auroc": f"{runs['control_auroc'].mean():.3f}", "found": f"{found} of {planted}"}
        row["canary_epsilon"] = f"{epsilon_of_ranks(found, threshold, references, shared):.2f}"
        row["refuted"] = str(int(runs["refuted"].sum()))
        if runs["user_trials"].notna().all():
            right, trials = int(runs["user_detected"].sum()), int(runs["user_trials"].sum())
            canary_users = int(runs["user_n_in"].sum() + runs["user_n_out"].sum())
            bound = epsilon_of_coins(canary_users, trials, right, float(runs["user_delta"].max()))
            row |= {"right": f"{right} of {trials}", "user_epsilon": f"{bound:.2f}"}
        table.append(row)
    write("dp-ftrl-attacks", table)


def user_level(folders: list[str]) -> None:
    """Write the settings of `user-level.toml` over seeds, and the differences that its directions name."""
    groups = by_seed(measured("user-level", folders, r"user-level-(?P<setting>.+)-[a-z_]+\d+-seed\d+"), ["setting"])
    names = {"records-4": "4 records", "records-16": "16 records", "users": "users, one step"}
    names |= {"fedavg": "users, FedAvg"}
    write("user-level", settings({label: groups[name] for name, label in names.items()}))
    pairs = [(a, b) for a in ("users", "fedavg") for b in ("records-4", "records-16")]
    named = {f"{names[a]} minus {names[b]}": (groups[a], groups[b]) for a, b in pairs}
    write("user-level-differences", differences(named))


def lora(folders: list[str], name: str = "lora") -> None:
    """Write exposure of LoRA and of full fine-tuning over seeds, at the end and at equal perplexity."""
    pattern = r"(?P<method>full|lora)-(?P<partition>iid|non-iid)-seed\d+"
    groups = by_seed(measured(name, folders, pattern), ["method", "partition"])
    labels = {"full": "all weights", "lora": "LoRA"}
    write(name, settings({f"{PARTITIONS[data]}, {labels[one]}": group for (one, data), group in groups.items()}))
    file = RESULTS / f"{name}-equal.parquet"
    if folders:
        equal = []
        for data in sorted({data for _, data in groups}):
            both = [[read_run(path) for path in Path(folders[0]).glob(f"{one}-{data}-seed*")] for one in labels]
            for seed, *runs in pairs_of_seeds(both[1], both[0]):
                change = pair_at_like_utility(*runs).differences.mean()
                equal.append({"partition": data, "seed": seed, "exposure": change})
        pd.DataFrame(equal).to_parquet(file, index=False)
    rows = []
    for partition, pairs in pd.read_parquet(file).groupby("partition"):
        a, b = groups["lora", partition], groups["full", partition]
        ends = {"exposure": a["exposure"] - b["exposure"], "perplexity": a["perplexity"] - b["perplexity"]}
        for at, values in {"end": ends, "equal perplexity": {"exposure": pairs["exposure"]}}.items():
            row = {"difference": f"{PARTITIONS[str(partition)]}, {at}"}
            row |= {"seeds": str(len(values["exposure"]))} | with_interval("exposure", values["exposure"])
            row |= {"exposure_p": f"{p_of(values['exposure']):.1g}"}
            rows.append(row | (with_interval("perplexity", ends["perplexity"]) if at == "end" else {}))
    write(f"{name}-differences", rows)


def demo(folders: list[str]) -> None:
    """Write IID minus non-IID over seeds 10 to 29 of `flsim demo`, at the end and at equal perplexity."""
    file = RESULTS / "demo.parquet"
    if folders:
        rows = []
        for folder in folders:
            runs = [read_run(Path(folder) / partition) for partition in PARTITIONS]
            pair = pair_at_like_utility(*runs)
            of_seed: dict[str, Any] = {"seed": runs[0].seed, "equal": pair.differences.mean()}
            for name, run in zip(("iid", "non_iid"), runs, strict=True):
                exposures: Any = run.of_canaries(PRIMARY.name, run.round)
                of_seed[f"{name}_exposure"] = exposures[pair.differences.index].mean()
                of_seed[f"{name}_perplexity"] = run.of_model(PERPLEXITY.name, run.round)
            rows.append(of_seed)
        pd.DataFrame(rows).sort_values("seed").to_parquet(file, index=False)
    seeds = pd.read_parquet(file).set_index("seed")
    ends = {name: seeds[f"iid_{name}"] - seeds[f"non_iid_{name}"] for name in ("exposure", "perplexity")}
    table = []
    for at, exposure in {"end of training": ends["exposure"], "equal perplexity": seeds["equal"]}.items():
        row = {"difference": at, "seeds": str(len(seeds))} | with_interval("exposure", exposure)
        row |= {"exposure_p": f"{p_of(exposure):.1g}"}
        table.append(row | (with_interval("perplexity", ends["perplexity"], 1) if at == "end of training" else {}))
    write("demo-new-seeds", table)


def once(folders: list[str]) -> None:
    """Write in how many new networks a secret that was read once is likelier than another number."""
    runs = measured("secret-sharer-once-runs", folders, r"secret-sharer-once-(?P<network>\w+)-.*")
    preferred = int(runs["rs_percent"].sum() / 100)
    low, high = share_interval(preferred, len(runs))
    row = {
        "seeds": f"{runs['seed'].min()} to {runs['seed'].max()}",
        "trained": str(len(runs)),
        "preferred": str(preferred),
    }
    row |= {"share": f"{runs['rs_percent'].mean():.0f}", "interval_over": "networks"}
    row |= {"share_low": f"{100 * low:.0f}", "share_high": f"{100 * high:.0f}"}
    write("secret-sharer-once-new", [{**row, "p": f"{stats.binomtest(preferred, len(runs)).pvalue:.2g}"}])


def layers(folders: list[str]) -> None:
    """Write the differences in exposure between networks of two layers and of one, over new seeds."""
    pattern = r"secret-sharer-table1-.*recurrent-(?P<network>\w+)-layers(?P<layers>\d)-.*"
    groups = by_seed(measured("secret-sharer-layers-runs", folders, pattern), ["network", "layers"])
    pairs = {
        f"{name.upper()}, two layers minus one": (groups[name, "2"], groups[name, "1"]) for name in ("gru", "lstm")
    }
    write("secret-sharer-layers", differences(pairs))


def units(folders: list[str]) -> None:
    """Write the differences in exposure between numbers of units, and between batch sizes, over new seeds."""
    pattern = r"secret-sharer-table2-lstm-batch_size(?P<batch>\d+)-units(?P<units>\d+)-.*"
    groups = by_seed(measured("secret-sharer-units-runs", folders, pattern), ["batch", "units"])
    pairs = {f"75 minus 45 units, batch size {size}": (groups[size, "75"], groups[size, "45"]) for size in ("8", "32")}
    pairs |= {
        f"batch size 32 minus 8, {units} units": (groups["32", units], groups["8", units]) for units in ("45", "75")
    }
    write("secret-sharer-units", differences(pairs))


def shadows_users(folders: list[str]) -> None:
    """Write the AUROC of attacks with shadow models on two random halves of 2,000 users.

    The attack with the highest AUROC on the first half is chosen; the second half tests it. Intervals resample users
    and runs.
    """
    stored = RESULTS / "shadows-users.parquet"
    if folders:
        paths = sorted(path.parent for folder in folders for path in Path(folder).glob("shadows-users-*/run.json"))
        shadows = collect(paths, 2_000)
        rows = [
            pd.DataFrame({"run": run, "target": shadows.targets, "attack": name, "is_in": is_in, "score": score})
            for name, scores in leave_one_out(shadows).items()
            for run, (score, is_in) in enumerate(zip(scores, shadows.is_in, strict=True))
        ]
        pd.concat(rows, ignore_index=True).astype({"score": "float32", "run": "int8"}).to_parquet(stored, index=False)
    scores = pd.read_parquet(stored).dropna()
    names = np.sort(scores["target"].unique())
    first = set(stream(0, "halves of users").permutation(names)[: len(names) // 2])
    table: list[Cells] = []
    for attack, rows_of_attack in scores.groupby("attack", sort=False):
        row = {"attack": str(attack)}
        for half, is_first in {"first": True, "second": False}.items():
            of_half = rows_of_attack[rows_of_attack["target"].isin(first) == is_first]
            values, is_in = (
                of_half.pivot(index="run", columns="target", values=name).to_numpy() for name in ("score", "is_in")
            )
            draws = [_auroc_of_draw(values, is_in, stream(0, "shadows of users", half, draw)) for draw in range(200)]
            low, high = np.quantile(draws, [0.025, 0.975])
            row |= {half: f"{_auroc_of(values, is_in):.3f}", f"{half}_low": f"{low:.3f}", f"{half}_high": f"{high:.3f}"}
        table.append({**row, "interval_over": "users and runs"})
    best = max(table, key=lambda row: row["first"])
    write("shadows-users", [{**row, "chosen": "yes" if row is best else ""} for row in table])


def _auroc_of(scores: Floats, is_in: Any) -> float:
    known = np.isfinite(scores)
    members = is_in.astype(bool)
    return auroc(scores[known & members], scores[known & ~members])


def _auroc_of_draw(scores: Floats, is_in: Any, rng: np.random.Generator) -> float:
    runs, users = (rng.integers(size, size=size) for size in scores.shape)
    return _auroc_of(scores[np.ix_(runs, users)], is_in[np.ix_(runs, users)])


SUMMARIES: dict[str, Callable[[list[str]], None]] = {
    "ten-times": ten_times,
    **{f"{name}-edge": partial(edge, name=name) for name in ("table1", "table2", "four-settings")},
    "table1": table1,
    "table2": table2,
    "four-settings": four_settings,
    **{name: partial(of_tier_smoke, name=name) for name in ("table3", "table4")},
    "table3-half": table3_half,
    "table4-half": table4_half,
    "dp-small": dp_small,
    "dp-ftrl": dp_ftrl,
    "dp-ftrl-attacks": dp_ftrl_attacks,
    "user-level": user_level,
    "lora": lora,
    "lora-smollm2": partial(lora, name="lora-smollm2"),
    "demo": demo,
    "once": once,
    "layers": layers,
    "units": units,
    "shadows-users": shadows_users,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SUMMARIES:
        sys.exit(f"usage: python -m experiments.summaries {{{','.join(SUMMARIES)}}} [RUNS ...]")
    SUMMARIES[sys.argv[1]](sys.argv[2:])
