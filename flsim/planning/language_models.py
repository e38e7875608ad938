"""The plan of training Hugging Face models: memory, bytes that are sent, and operations, by arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flsim.data.corpus import Split
from flsim.planning.scale import Users, cell, duration, number, row_name, size, table, trained_on
from flsim.runs.config import Config
from flsim.runs.sweeps.definition import Planned
from flsim.show.table import note
from flsim.training.footprint import OPERATIONS

REQUEST, REPLY = 4, 8  # bytes of a trained weight: float32 to a client, and sums in float64 back
NOTE = (
    "By arithmetic, without weights. Memory: of one process that trains: the base, and for each of the users that "
    "train at once trained weights, activations and logits of a batch of the longest records. No layer is computed "
    "again to save memory. The machine's memory also holds the base for each process. Sent: to and from all clients in "
    f"a round. FLOP and time: of a round, or of a step; time on GPUs that compute {OPERATIONS / 1e12:.0f} TFLOP/s, as "
    "an H100 in large products; small models take longer."
)


@dataclass(frozen=True)
class Finetuning:
    """What equal rows of Hugging Face models need; None for values that do not apply."""

    name: str = cell("Row, first of", is_number=False)
    rows: int = cell("rows", number)
    trained: int = cell("trained", number)
    base: int = cell("base", size)
    user: int = cell("each user", size)
    at_once: int = cell("users", number)
    memory: int = cell("memory", size)
    clients: int = cell("clients", number)
    sent: int | None = cell("sent", size)
    operations: float = cell("FLOP", "{:.1e}".format)
    seconds: float | None = cell("time", duration)


def finetuning_of(planned: Iterable[Planned], train: Split) -> tuple[Finetuning, ...]:
    """Return what each row of Hugging Face models needs, once for equal rows.

    Args:
        planned: the runs.
        train: the corpus' training users.
    """
    equal: dict[Finetuning, list[str]] = {}
    for run in planned:
        if run.config.model.architecture == "hf":
            names = equal.setdefault(_of(run.config, train), [])
            names += [row_name(run)] * (row_name(run) not in names)
    return tuple(replace(needs, name=names[0], rows=len(names)) for needs, names in equal.items())


def _of(config: Config, train: Split) -> Finetuning:
    needs, users = config.footprint(train.layout), Users.counted(trained_on(config, train))
    sent = config.clients * needs.trained * (REQUEST + REPLY) or None
    records = config.records_of_round(users.records // users.users)
    operations = needs.operations * records * (users.words / users.records + 1)
    seconds = None if needs.gpu is None else operations / (OPERATIONS * max(1, config.clients))
    sizes = needs.trained, needs.base, needs.user, needs.at_once, needs.memory
    return Finetuning("", 1, *sizes, config.clients, sent, operations, seconds)


def finetuning_table(rows: tuple[Finetuning, ...]) -> str:
    """Return the table of what training needs."""
    return table(rows, note(NOTE))
