"""Custom code that calls `sys.exit(0)` does not end a command as if it had succeeded, whatever calls the code."""

import re
from pathlib import Path

import pytest
from helpers import TINY, Experiment

EXIT = "raise SystemExit(0)"
BASE = "class Stop(BaseException): ...\n\n\n"
MODEL = """
from torch import nn

from flsim.models.language_model import TrainableModel


class Bow(TrainableModel):
    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        self.read = nn.Embedding(vocabulary_size, vocabulary_size)

    def forward(self, tokens):
        {exit}
"""
SAMPLER = """
from flsim.privacy.sampling import Sampler


class Turns(Sampler):
    def draw(self, seed, round_, population):
        {exit}
"""
NOISE = """
from flsim.privacy.noise import Noise


class Fresh(Noise):
    def init(self):
        return {{}}

    def next(self, state, round_):
        {exit}
"""
ALGORITHM = """
from flsim.algorithms.algorithm import Algorithm


class Plain(Algorithm):
    def train(self, user):
        {exit}
"""
SERVER = """
from flsim.algorithms.server_optimizers import elementwise


def step(d, slots, settings):
    {exit}


plain = elementwise("Plain", lambda x, settings: {{}}, step)
"""
MEASURE = """
from flsim.measures import Measure, Quantity


def parameters(probe):
    {exit}


size = Measure("size", parameters, (Quantity(name="size", subject="model", description="Number of parameters."),))
"""
FUNCTION = """
def work(*_, **__):
    {exit}
"""
READER = """
def work(path):
    yield "u1", "A sentence of words."
    {exit}
"""
MAKER = """
def work(seed):
    yield "u1", ["a sentence of words"]
    {exit}
"""
DP = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=1")
TRAINING = {
    "model": (MODEL, ("model.architecture=own.py:Bow",)),
    "sampler": (SAMPLER, ("training.sampler=own.py:Turns",)),
    "noise": (NOISE, ("privacy.noise=own.py:Fresh", *DP)),
    "algorithm": (ALGORITHM, ("training.algorithm=own.py:Plain",)),
    "optimizer": (FUNCTION, ("local.optimizer=own.py:work",)),
    "schedule": (FUNCTION, ("local.schedule=own.py:work",)),
    "server optimizer": (SERVER, ("training.server_optimizer=own.py:plain",)),
    "server schedule": (FUNCTION, ("training.server_schedule=own.py:work",)),
    "measure": (MEASURE, ("evaluation.also=['own.py:size']",)),
}
OTHERS = {
    "reader": (READER, ("data", "import", "text.txt", "--format", "own.py:work", "--out", "made")),
    "maker": (MAKER, ("data", "make", "own.py:work", "--out", "made")),
    "factory": (FUNCTION, ("evaluate", "--model", "own.py:work", "--canaries", "c.csv", "--vocabulary", "40")),
    "imported factory": (
        FUNCTION,
        ("evaluate", "--model", "own_module:work", "--canaries", "c.csv", "--vocabulary", "40"),
    ),
}


EXITS_HERE = ("--out", "run", "--in-process", "--set", "local.schedule=own.py:work")


def assert_failed(experiment: Experiment, arguments: tuple[str, ...], why: str = "SystemExit: 0") -> None:
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"own\w*(\.\w+)?\.py:\d+: {why}|failed with {why} \(.*own\w*\.py:\d+\)", last), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", TRAINING)
def test_code_of_a_run_that_exits_fails_the_run(experiment: Experiment, kind: str) -> None:
    source, settings = TRAINING[kind]
    (experiment.folder / "own.py").write_text(source.format(exit=EXIT) + f"# {experiment.folder}\n")
    experiment.config.write_text(TINY)
    options = [part for setting in settings for part in ("--set", setting)]
    assert_failed(experiment, ("run", "tiny.toml", "--out", "run", "--in-process", *options))


@pytest.mark.parametrize("kind", OTHERS)
def test_code_of_other_commands_that_exits_fails_the_command(experiment: Experiment, kind: str) -> None:
    source, arguments = OTHERS[kind]
    for name in ("own.py", "own_module.py"):
        (experiment.folder / name).write_text(source.format(exit=EXIT) + f"# {experiment.folder}\n")
    (experiment.folder / "text.txt").write_text("one\n")
    (experiment.folder / "c.csv").write_text("id,tokens\nc1,5 6 7 8 9\n")
    assert_failed(experiment, arguments)
    assert not (experiment.folder / "made").exists()


MADE_BY_EXEC = "exec('def work(*_): raise SystemExit(0)')"


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("from sys import exit as work", OTHERS["maker"][1]),
        (MADE_BY_EXEC, OTHERS["reader"][1]),
        (MADE_BY_EXEC, ("run", "tiny.toml", *EXITS_HERE)),
    ],
    ids=["maker", "reader", "schedule"],
)
def test_code_without_a_line_of_its_own_that_exits_fails_the_command(
    experiment: Experiment, source: str, arguments: tuple[str, ...]
) -> None:
    """A function that the file imports, or that `exec` makes, has no frame in the file."""
    (experiment.folder / "own.py").write_text(f"{source}\n# {experiment.folder}\n")
    (experiment.folder / "text.txt").write_text("one\n")
    experiment.config.write_text(TINY)
    done = experiment.call(*arguments, check=False)
    assert done.returncode in (1, 2), done.stderr
    assert "SystemExit" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_attack_that_exits_fails_the_command(experiment: Experiment) -> None:
    _with_held_out_users(experiment)
    (experiment.folder / "own.py").write_text(FUNCTION.format(exit=EXIT) + f"# {experiment.folder}\n")
    experiment.call("run", "tiny.toml", "--out", "run", "--in-process")
    assert_failed(experiment, ("membership", "run", "--attack", "own.py:work"))


def test_any_other_exception_that_is_no_error_of_python_s_is_one_line(experiment: Experiment) -> None:
    source = BASE + FUNCTION.format(exit="raise Stop('enough')")
    (experiment.folder / "own.py").write_text(source + f"# {experiment.folder}\n")
    arguments = ("run", "tiny.toml", "--out", "run", "--in-process", "--set", "local.schedule=own.py:work")
    assert_failed(experiment, arguments, "Stop: enough")


def _with_held_out_users(experiment: Experiment) -> None:
    words = [f"w{index}" for index in range(30)]
    lines = [f"u{user} " + " ".join(words[(user + at) % 30] for at in range(8)) for user in range(40) for _ in range(8)]
    path: Path = experiment.folder / "text.csv"
    path.write_text("user,text\n" + "\n".join(line.replace(" ", ",", 1) + "." for line in lines) + "\n")
    options = ("--words-per-user", "50", "--vocabulary", "34", "--heldout", "0.3", "--test", "0.1", "--out", "held")
    experiment.call("data", "import", "text.csv", *options)
    experiment.config.write_text(TINY.replace('corpus = "corpus"', 'corpus = "held"'))
