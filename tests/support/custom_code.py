"""Minimal custom code of each kind: files that a user writes and names in settings or commands."""

import ast
import random
import shutil

from helpers import Experiment

CODE = {
    "model": """
from torch import nn

from flsim.models.language_model import TrainableModel


class Bow(TrainableModel):
    def __init__(self, vocabulary_size, hparams):
        super().__init__(vocabulary_size, hparams)
        self.read = nn.Embedding(vocabulary_size, 6)
        self.write = nn.Linear(6, vocabulary_size)

    def forward(self, tokens):
        return self.write(self.read(tokens))
""",
    "sampler": """
import numpy as np

from flsim.base.rng import stream
from flsim.privacy.sampling import Sampler


class Turns(Sampler):
    relation = "replace-one"

    def draw(self, seed, round_, population):
        order = stream(seed, "turns").permutation(population)
        return np.sort(order[(round_ * self.cohort + np.arange(self.cohort)) % population])

    def event(self, population, mechanism):
        return mechanism
""",
    "noise": """
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

from flsim.privacy.noise import Noise


class Fresh(Noise):
    def init(self):
        return {}

    def next(self, state, round_):
        return self.fresh(round_), {}

    @staticmethod
    def event(sampled, noise_multiplier, rounds):
        return SelfComposedDpEvent(sampled(GaussianDpEvent(noise_multiplier)), rounds)
""",
    "measure": """
from flsim.measures import Measure, ModelProbe, Quantity


def parameters(probe: ModelProbe) -> float:
    return sum(parameter.numel() for parameter in probe.model.parameters())

size = Measure("size", parameters, (Quantity(name="size", subject="model", description="Number of parameters."),))
""",
    "algorithm": """
from flsim.algorithms.algorithm import Algorithm


class Plain(Algorithm):
    def train(self, user):
        return super().train(user)
""",
    "optimizer": """
import torch


def plain(parameters, lr):
    return torch.optim.SGD(parameters, lr)
""",
    "server_optimizer": """
from flsim.algorithms.server_optimizers import elementwise


def step(d, slots, settings):
    return d, {}

plain = elementwise("Plain", lambda x, settings: {}, step)
""",
    "schedule": """
def constant(done, total):
    return 1.0
""",
    "attack": """
def worst_word(candidates):
    return candidates.log_probs.min(axis=1)
""",
    "format": """
def lines(path):
    for line in path.read_text().splitlines():
        user, _, text = line.partition(" ")
        yield user, [text]
""",
    "factory": """
def model():
    return None
""",
}

SETTINGS = {
    "model": 'model.architecture="model.py:Bow"',
    "sampler": 'training.sampler="sampler.py:Turns"',
    "noise": 'privacy.noise="noise.py:Fresh"',
    "measure": 'evaluation.also=["measure.py:size"]',
    "algorithm": 'training.algorithm="algorithm.py:Plain"',
    "optimizer": 'local.optimizer="optimizer.py:plain"',
    "server_optimizer": 'training.server_optimizer="server_optimizer.py:plain"',
    "schedule": 'local.schedule="schedule.py:constant"',
}


def exiting(kind: str, statement: str = "raise SystemExit(0)") -> str:
    """Return the code of a kind, in which `statement` is the first statement of each function except constructors."""
    tree = ast.parse(CODE[kind])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            node.body.insert(0, *ast.parse(statement).body)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def import_held_out_users(experiment: Experiment) -> None:
    """Import a corpus of 40 users, some of them held out, with the custom format `format.py`; write it if missing."""
    rng, words = random.Random(0), [f"w{index}" for index in range(30)]
    lines = [f"u{user:02d} {' '.join(rng.choices(words, k=8))}." for user in range(40) for _ in range(8)]
    (experiment.folder / "text.txt").write_text("\n".join(lines) + "\n")
    if not (experiment.folder / "format.py").exists():
        (experiment.folder / "format.py").write_text(CODE["format"])
    options = ["--format", "format.py:lines", "--vocabulary", "34", "--heldout", "0.3", "--test", "0.1"]
    shutil.rmtree(experiment.folder / "corpus", ignore_errors=True)
    experiment.call("data", "import", "text.txt", *options, "--words-per-user", "50", "--out", "corpus")
