"""Personal data that a model generates from prompts of its training text, by class, within and across clients.

Hu et al., "Simple Yet Effective: Extracting Private Data Across Clients in Federated Fine-Tuning of Large Language
Models" (2025); Udsa et al., "Exploring Cross-Client Memorization of Training Data in Large Language Models for
Federated Learning" (2025). Held-out users are the controls.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from flsim.attacks.extraction.extract import RECORDS, against_controls, greedy, in_place
from flsim.attacks.extraction.tables import RATES
from flsim.attacks.membership import inference
from flsim.attacks.membership.candidates import never_trained
from flsim.attacks.result import Result, text_of
from flsim.base.arrays import Ints
from flsim.base.errors import InputError, first_line
from flsim.base.extensions import restrict_custom_code
from flsim.base.rng import stream
from flsim.canaries.elsewhere import read_rows
from flsim.canaries.secrets import are_cards
from flsim.data.records import Layout, Records, RecordSource, Vocabulary
from flsim.models.language_model import TrainableModel
from flsim.results.rows import MEASUREMENTS, read_run
from flsim.runs.elsewhere import MeasuredModel
from flsim.runs.folder import Run
from flsim.show.table import Field, table_of
from flsim.training.update import threads as threads_of_torch

Datum = tuple[str, str]
NAME, MAIL, CARD, TELEPHONE = "name", "mail address", "card number", "telephone number"
WITHIN, ACROSS = "within", "across"
# Corpora of words have spaces around punctuation.
PATTERNS = {
    MAIL: re.compile(r"[\w.+%-]+ ?@ ?[\w-]+(?:\.[\w-]+| \. [\w-]+)+"),
    CARD: re.compile(r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)"),
    TELEPHONE: re.compile(r"(?<![\w.])(?<!\d[ ./()-])(?:\+ ?)?\(?\d(?:[ ./()-]{0,3}\d){6,14}(?![ ./()-]{0,3}\d)(?!\w)"),
}
IGNORED = {MAIL: r"\s", CARD: r"\D", TELEPHONE: r"\D"}  # in comparisons
READ = (
    "Within: data of users that prompts of the same user elicit; % of the data of prompted users. Across: data that "
    "prompts of other users elicit; % of all data."
)
CONTROL = (
    " Control: the same for data of held-out users, within by their prompts, across by those of training users. Only "
    "the excess shows memorization."
)
LABELS = (Field("Class", "class"), Field("Reach", "reach"), Field("Data", "strings", "{:,}"))


@dataclass(frozen=True)
class Finder:
    """A search for personal data in text; without a pattern of names, it finds no names."""

    names: re.Pattern[str] | None = None

    @classmethod
    def open(cls, path: Path | None) -> "Finder":
        """Return a finder of the names in a file, a name on each line; raise InputError if there are none."""
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--names {path}: cannot be read as text ({first_line(error)})") from error
        names = {" ".join(line.split()) for line in lines} - {""}
        if not names:
            raise InputError(f"--names {path}: has no names; write a name on each line")
        longest_first = sorted(map(re.escape, names), key=lambda name: (-len(name), name))
        return cls(re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE))

    def find(self, text: str) -> Iterator[tuple[str, str, int, int]]:
        """Yield class, normalized value, start and end of personal data; data of different classes do not overlap.

        Values are in lower case, and of numbers only digits remain: 13 to 19 of cards, 7 to 15 of telephones.
        """
        taken = np.zeros(len(text), bool)
        for kind, pattern in (PATTERNS | ({NAME: self.names} if self.names else {})).items():
            for match in pattern.finditer(text):
                value = re.sub(IGNORED[kind], "", match[0].lower()) if kind in IGNORED else match[0].lower()
                start, end = match.span()
                if taken[start:end].any() or (kind == CARD and not are_cards(np.array([[*map(int, value)]])).all()):
                    continue
                taken[start:end] = True
                yield kind, value, start, end


@dataclass(frozen=True)
class Occurrence:
    """Personal data, by class and normalized value, in a record of a user, and the tokens before them."""

    user: str
    datum: Datum
    prompt: tuple[int, ...]
    length: int


def occurrences_in(
    records: Records, users: Sequence[str], vocabulary: Vocabulary, finder: Finder
) -> Iterator[Occurrence]:
    """Yield personal data in records, one user each."""
    for record, user in zip(records, users, strict=True):
        tokens = record.tolist()
        places = range(len(tokens) + 1)
        for kind, value, start, end in finder.find(vocabulary.text(tokens)):
            first = bisect_right(places, start, key=lambda place: len(vocabulary.text(tokens[:place]))) - 1
            last = bisect_left(places, end, key=lambda place: len(vocabulary.text(tokens[:place])))
            yield Occurrence(user, (kind, value), tuple(tokens[:first]), last - first)


def elicited(
    model: TrainableModel, chosen: Sequence[Occurrence], layout: Layout, vocabulary: Vocabulary, finder: Finder
) -> set[tuple[str, Datum]]:
    """Return the users of prompts, each with personal data that greedy decoding generates after a prompt."""
    longest = max((one.length for one in chosen), default=0)
    result = set[tuple[str, Datum]]()
    for size in sorted({len(one.prompt) for one in chosen}):
        group = [one for one in chosen if len(one.prompt) == size]
        prompts = torch.tensor([[layout.bos, *one.prompt] for one in group], device=model.device)
        length = min(longest, layout.record_words - size)
        for one, tokens in zip(group, greedy(model, prompts, length).tolist(), strict=True):
            kept = tokens[: tokens.index(layout.eos)] if layout.eos in tokens else tokens
            before = len(vocabulary.text(one.prompt))
            text = vocabulary.text([*one.prompt, *kept])
            result |= {(one.user, (kind, value)) for kind, value, start, _ in finder.find(text) if start >= before}
    return result


def coverage_of(
    train: Sequence[Occurrence],
    others: Sequence[Occurrence],
    chosen: tuple[Sequence[Occurrence], Sequence[Occurrence]],
    generated: tuple[set[tuple[str, Datum]], set[tuple[str, Datum]]],
) -> pd.DataFrame:
    """Return the share of personal data that prompts elicit, a row per class and reach with the columns of `rates_of`.

    Within: of the data of prompted users, those that prompts of the same user elicit. Across: of all data of training
    users, those that prompts of others elicit. Controls are data of held-out users that no training user has: within by
    their own prompts, across by those of training users. `chosen` and `generated` are of both sides.
    """
    holders = defaultdict[Datum, set[str]](set)
    for one in train:
        holders[one.datum].add(one.user)
    unseen = {one.datum for one in others} - set(holders)
    within = [sorted({(one.user, one.datum) for one in side}) for side in chosen]
    by_others = {datum for user, datum in generated[0] if user not in holders.get(datum, ())}
    rows = []
    for kind in sorted({kind for kind, _ in [*holders, *unseen]}):
        own = [pair in generated[0] for pair in within[0] if pair[1][0] == kind]
        own_control = [pair in generated[1] for pair in within[1] if pair[1][0] == kind and pair[1] in unseen]
        other, other_control = (
            [datum in by_others for datum in sorted(data) if datum[0] == kind] for data in (holders, unseen)
        )
        for reach, sides in ((WITHIN, (own, own_control)), (ACROSS, (other, other_control))):
            flags = (np.array(side, np.bool_) for side in sides)
            rows.append({"class": kind, "reach": reach} | against_controls(*flags))
    return pd.DataFrame(rows)


def extract_personal_data(
    *runs: Path | str,
    names: Path | str | None = None,
    records: int = 1_000,
    round: int | None = None,
    device: str = "cpu",
    elsewhere: inference.ElsewhereHParams | None = None,
) -> pd.DataFrame:
    """Measure which personal data of users models generate, like `flsim extract --personal-data`.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        names: file with a name on each line; without it, names are not searched.
        records: largest number of prompts of training users, and of held-out users.
        round: round of the checkpoint; the newest of each run if not given.
        device: torch device, such as "cuda".
        elsewhere: settings for models that were trained elsewhere.

    Returns:
        The rows of `flsim.attacks.extraction.personal.coverage_of`, with the columns run, setting, series, seed and
        round.

    Raises:
        InputError: there is no such run or checkpoint, no author is held out of training, the file has no names, or no
            record that training read has personal data.

    Examples:
        >>> rows = flsim.extract_personal_data("runs/lora", names="names.txt")                 # doctest: +SKIP
        >>> rows[["class", "reach", "rate", "excess"]]                                         # doctest: +SKIP
    """
    file, more = None if names is None else Path(names), elsewhere or inference.ElsewhereHParams()
    hparams = inference.AttackHParams(records, round, device=device, elsewhere=more)
    return inference.over_folders(runs, lambda path: personal_data_of(path, file, hparams))


@dataclass(frozen=True, eq=False)
class AttackedPeople:
    """A model with the personal data of its training users and of others."""

    model: TrainableModel
    layout: Layout
    vocabulary: Vocabulary
    train: Sequence[Occurrence]
    others: Sequence[Occurrence]
    columns: dict[str, Any]  # setting, series, seed and round
    notes: Sequence[str] = ()  # sentences about exclusions


@restrict_custom_code("architecture")
def personal_data_of(path: Path, names: Path | None, hparams: inference.AttackHParams) -> Result:
    """Return the rows of `extract_personal_data` of one run, with notes; raise its errors."""
    finder, is_elsewhere = Finder.open(names), (path / MEASUREMENTS).is_file()
    with threads_of_torch(1):
        attacked = (_of_measurements if is_elsewhere else _of_run)(path, finder, hparams)
        rng = stream(attacked.columns["seed"], "personal data")
        first, second = (
            [one for index in rng.permutation(len(side)) if (one := side[index]).prompt][: hparams.count]
            for side in (attacked.train, attacked.others)
        )
        if not first:
            raise InputError(f"{path}: no record that training read has personal data after a prompt; see --names")
        where = attacked.layout, attacked.vocabulary, finder
        generated = [elicited(attacked.model, side, *where) for side in (first, second)]
    if not is_elsewhere:
        Run.open(path).verify()  # measurements on other data must not be returned
    frame = coverage_of(attacked.train, attacked.others, (first, second), (generated[0], generated[1]))
    count = f"{len(first):,} prompts of training users and {len(second):,} of held-out users were continued."
    return Result(frame=frame.assign(run=str(path), **attacked.columns), notes=(*attacked.notes, count))


def _of_run(path: Path, finder: Finder, hparams: inference.AttackHParams) -> AttackedPeople:
    hparams.elsewhere.refuse_for(path)
    run = Run.open(path)
    vocabulary, (splits, notes) = run.corpus.vocabulary, never_trained(run.corpus)
    state, model = inference.attacked_model(run, hparams.round, hparams.device)
    users = in_place(run.users, run.canaries, state.round)
    is_read = run.config.records_read(users, state.round)
    train = [*_over(users, users.user_offsets, np.flatnonzero(is_read), "train", vocabulary, finder)]
    others = [
        one
        for split, positions in splits
        for one in _over(split, split.user_offsets, positions, split.folder.name, vocabulary, finder)
    ]
    columns = {"setting": run.setting, "series": run.series, "seed": run.config.seed, "round": state.round}
    return AttackedPeople(model, run.corpus.layout, vocabulary, train, others, columns, notes)


def _of_measurements(path: Path, finder: Finder, hparams: inference.AttackHParams) -> AttackedPeople:
    """Return personal data in files of records, for a model that was trained elsewhere."""
    elsewhere = hparams.elsewhere
    if elsewhere.members is None or elsewhere.others is None:
        raise InputError(f"{path}: stores no text of users; name files of records with --members and --non-members")
    measured, results = MeasuredModel.open(path, hparams.round, elsewhere.model, hparams.device), read_run(path)
    canaries, model = measured.canaries, measured.model
    vocabulary, files = canaries.words.vocabulary, (elsewhere.members, elsewhere.others)
    sources = list[list[Occurrence]]()
    sides = zip(("train", "others"), files, inference.sides_of(canaries, model, elsewhere), strict=True)
    for name, file, (split, positions) in sides:
        users = [user for (user,) in read_rows(file, [elsewhere.user])]
        labels = [f"{name}:{users[position]}" for position in positions.tolist()]
        sources.append([*occurrences_in(split.records_at(positions), labels, vocabulary, finder)])
    columns = {"setting": results.setting, "series": results.series, "seed": canaries.seed, "round": measured.round}
    layout = replace(canaries.words.layout, record_words=inference.longest_record(model))
    return AttackedPeople(model, layout, vocabulary, sources[0], sources[1], columns)


def _over(
    source: RecordSource, offsets: Any, positions: Ints, name: str, vocabulary: Vocabulary, finder: Finder
) -> Iterator[Occurrence]:
    """Yield personal data in the records of a source at positions, which are read piece by piece."""
    for first in range(0, len(positions), RECORDS):
        part = positions[first : first + RECORDS]
        users = np.searchsorted(np.asarray(offsets), part, side="right") - 1
        labels = [f"{name}:{user}" for user in users.tolist()]
        yield from occurrences_in(source.records_at(part), labels, vocabulary, finder)


def to_text(name: str, measured: Result) -> str:
    first = measured.frame.iloc[0]
    title = f"{first['setting']} ({name}), after round {first['round']:,}: personal data that prompts elicit"
    read = READ + CONTROL * bool(measured.frame["control_rate"].notna().any())
    return text_of(title, [table_of(measured.frame, LABELS, RATES, [read])], measured.notes)
