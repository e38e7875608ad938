"""The Ray nodes that a run can use: those with the same code, whatever was shipped, and the same files.

Any different version is an error, because it is unknown which change results; a different processor is only reported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, RuntimeEnvSetupError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flsim.base.errors import InputError, RunFailed, in_one_line, last_line
from flsim.base.machine import processor, versions
from flsim.base.progress import say
from flsim.data.corpus import Corpus
from flsim.data.stores import is_uri, located
from flsim.runs.config import load
from server.cluster.causes import death

# seconds in which all nodes must answer at the start of a run; a cold node imports from a shared filesystem
DEADLINE = 300.0
SHARE = "move it to a filesystem that all nodes share, under the same path"
REACH = "give the node access to the store, and credentials in the environment of its Ray"

Node = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    versions: dict[str, str]
    processor: str
    # digest of the run's settings, as far as results depend on them, and of its custom code; None if the node cannot
    # read the folder
    run: str | None
    corpus: str | None  # digest of the corpus's manifest; None if the node cannot open the corpus
    trouble: str = ""  # the reason why it cannot open the corpus


def environment_of(run: Path, corpus: Path | str) -> Environment:
    """Return the code, files and processor of this node; a corpus in an object store is fetched."""
    try:
        settings = load(run / "config.toml").digest  # not of the file, which is replaced at the start of a run
    except (InputError, OSError):
        settings = None
    try:
        return Environment(versions(), processor(), settings, Corpus.open(corpus).digest)
    except InputError as error:
        return Environment(versions(), processor(), settings, None, in_one_line(error))


class Nodes:
    """The nodes of the connected cluster, checked for a run; for Ray, a node that returns is another node."""

    def __init__(self, run: Path, corpus: Path | str, is_local: bool = False) -> None:
        """Prepare the checks of nodes, which must read run and corpus (a folder or URI); a local cluster needs none."""
        self._paths = run.resolve(), located(corpus)
        self._local = environment_of(*self._paths)
        self._asked: dict[ray.ObjectRef, str] = {}  # node by its future reply
        self._known = {node: str(what["NodeManagerAddress"]) for node, what in _alive().items() if is_local}
        self._good = {*self._known}
        self._lost: set[str] = set()  # nodes whose process died before it could answer

    def check(self) -> None:
        """Ask all nodes and wait; InputError names those that differ or are silent, RunFailed if Ray lost an answer."""
        self._ask_new(_alive())
        _, silent = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=DEADLINE) if self._asked else ((), ())
        )
        refused = [f"{self._name(self._asked[reply])} does not answer within {DEADLINE:g} s" for reply in silent]
        refused += [f"{self._name(node)} {why}" for node, why in self._answers() if why]
        if refused:
            only_lost = len(refused) == len(self._lost)
            raise (RunFailed if only_lost else InputError)("; ".join(sorted(refused)))

    def usable(self) -> list[Node]:
        """Return the nodes that are alive and equal to this process, as `ray.nodes` does; new nodes are asked."""
        alive = _alive()
        for node in self._good - alive.keys():
            self._good.remove(node)
            say(f"{self._name(node)} left the cluster")
        self._ask_new(alive)
        for node, why in self._answers():
            if node in alive:
                cpus, gpus = (alive[node]["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))
                use = f", but is not used, because it {why}" if why else f": {cpus:g} CPUs, {gpus:g} GPUs"
                say(f"{self._name(node)} joined{use}")
        return [alive[node] for node in alive if node in self._good]

    def _ask_new(self, alive: dict[str, Node]) -> None:
        for node in alive.keys() - self._known.keys():
            self._known[node] = alive[node]["NodeManagerAddress"]
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(environment_of).options(num_cpus=0, scheduling_strategy=on_node)
            self._asked[task.remote(*self._paths)] = node

    def _answers(self) -> list[tuple[str, str]]:
        """Return nodes with new answers, with the reason why each is not usable, or ""; without nodes that left."""
        answers = []
        for reply in ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else ():
            node = self._asked.pop(reply)
            try:
                why = self._differs(node, ray.get(reply))
            except (NodeDiedError, TaskUnschedulableError):
                continue
            except (RayTaskError, RuntimeEnvSetupError) as error:
                why = f"cannot run this code ({last_line(error)})"
            except RayError as error:
                why = f"does not answer: {death(error)}"
                self._lost.add(node)
            if not why:
                self._good.add(node)
            answers.append((node, why))
        return answers

    def _differs(self, node: str, remote: Environment) -> str:
        """Return the differences of a node, for a sentence that begins with the node; empty if there are none."""
        local, (run, corpus) = self._local, self._paths
        both = {*local.versions, *remote.versions}
        names = sorted(name for name in both if local.versions.get(name) != remote.versions.get(name))
        if names:
            return "has " + ", ".join(
                f"{name} {_short(remote, name)} but this process has {_short(local, name)}" for name in names
            )
        if remote.corpus is None and is_uri(corpus):
            return f"cannot read the corpus {corpus} ({remote.trouble}); {REACH}"
        for seen, expected, what, path in (
            (remote.run, local.run, "run folder", run),
            (remote.corpus, local.corpus, "corpus", corpus),
        ):
            if seen is None:
                return f"cannot read the {what} {path}; {SHARE}"
            if seen != expected:
                return f"has another {what} at {path}; {SHARE}"
        if remote.processor != local.processor:
            say(
                f"{self._name(node)} has a different processor ({remote.processor}) from this machine "
                f"({local.processor}); the last bits of results can differ from a run on equal machines"
            )
        return ""

    def _name(self, node: str) -> str:
        return f"node {self._known[node]}"


def _alive() -> dict[str, Node]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _short(environment: Environment, name: str) -> str:
    version = environment.versions.get(name, "nothing")
    return version[:12] if name == "flsim" else version
