"""Which Ray nodes may be used: those that run the same code, and see the same files, as this process.

Any difference in a version is refused, though most would change no result: nobody knows which do. Another processor is
only reported, since few clusters consist of equal ones. The digest of the code is compared although the code is shipped
(`server.cluster.start`): a worker may import an older checkout all the same.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, RuntimeEnvSetupError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flsim.base.errors import InputError, RunFailed
from flsim.base.files import digest, file_digest
from flsim.base.progress import say
from flsim.base.versions import processor, versions
from flsim.data.corpus import Corpus
from flsim.data.stores import is_uri, located
from flsim.runs.config.own_code import FOLDER
from server.cluster.causes import death

DEADLINE = 300.0  # seconds in which all nodes answer at a run's start; a cold one imports from a shared filesystem
SHARE = "put it on a filesystem that all nodes share, under the same path"
REACH = "give it a way to that store, and credentials in the environment that its Ray was started in"

Node = dict[str, Any]


@dataclass(frozen=True)
class About:
    """What there is at a node.

    Attributes:
        versions: of code and libraries.
        processor: its model.
        run: digest of the run's settings and of its user's own code, or None where its folder is not seen.
        corpus: digest of the corpus's manifest, or None where it cannot be opened.
        trouble: why it cannot.
    """

    versions: dict[str, str]
    processor: str
    run: str | None
    corpus: str | None
    trouble: str = ""


def about(run: Path, corpus: Path | str) -> About:
    """Of where this is called; a corpus in an object store is fetched."""
    try:
        files = [run / "config.toml", *sorted((run / FOLDER).glob("*.py"))]
        settings = digest(*map(file_digest, files))
    except OSError:
        settings = None
    try:
        return About(versions(), processor(), settings, Corpus.open(corpus).digest)
    except InputError as error:
        return About(versions(), processor(), settings, None, " ".join(str(error).split()))


class Nodes:
    """Looks after the nodes of the cluster that is connected, for a run.

    A node that leaves is never asked again; one that comes back is another node to Ray.
    """

    def __init__(self, run: Path, corpus: Path | str, is_local: bool = False) -> None:
        """Nothing is asked yet.

        Args:
            run, corpus: their folders, which all nodes are to see; or the URI of a corpus.
            is_local: this process has started the cluster, for itself alone. So its one node runs this code and sees
                these files, and is not asked: a process that answers takes as long to start as a client.
        """
        self._paths = run.resolve(), located(corpus)
        self._here = about(*self._paths)
        self._asked: dict[ray.ObjectRef, str] = {}  # reply to be -> node
        self._known = {node: str(what["NodeManagerAddress"]) for node, what in _alive().items() if is_local}
        self._good = {*self._known}
        self._lost: set[str] = set()  # nodes whose process died before it could answer

    def check(self) -> None:
        """Ask all nodes that are there, and wait for them.

        Raises:
            InputError: some differ from this process, or do not answer; it says which, and in what.
            RunFailed: none differs, but Ray lost a process that was to answer, as where memory runs out.
        """
        self._ask_new(_alive())
        _, silent = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=DEADLINE) if self._asked else ((), ())
        )
        refused = [f"{self._name(self._asked[each])} does not answer within {DEADLINE:g} s" for each in silent]
        refused += [f"{self._name(node)} {why}" for node, why in self._answers() if why]
        if refused:
            only_lost = len(refused) == len(self._lost)
            raise (RunFailed if only_lost else InputError)("; ".join(sorted(refused)))

    def usable(self) -> list[Node]:
        """Nodes that are alive and were found to be equal, as `ray.nodes` describes them; cheap, and never waits.

        Nodes that are new are asked meanwhile, and are among those of a later call. What changed is said, once.
        """
        alive = _alive()
        for node in self._good - alive.keys():
            self._good.remove(node)
            say(f"{self._name(node)} left the cluster")
        self._ask_new(alive)
        for node, why in self._answers():
            if node in alive:
                say(
                    f"{self._name(node)} "
                    + (f"joined, but is not used: it {why}" if why else f"joined: {_size(alive[node])}")
                )
        return [alive[node] for node in alive if node in self._good]

    def _ask_new(self, alive: dict[str, Node]) -> None:
        for node in alive.keys() - self._known.keys():
            self._known[node] = alive[node]["NodeManagerAddress"]
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(about).options(num_cpus=0, scheduling_strategy=there)
            self._asked[task.remote(*self._paths)] = node

    def _answers(self) -> list[tuple[str, str]]:
        """Nodes that have answered since, and why they are not usable, or nothing; those that left are left out."""
        answers = []
        for reply in ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else ():
            node = self._asked.pop(reply)
            try:
                why = self._differs(node, ray.get(reply))
            except (NodeDiedError, TaskUnschedulableError):
                continue
            except (RayTaskError, RuntimeEnvSetupError) as error:
                why = f"cannot run this code ({_last_line(error)})"
            except RayError as error:
                why = f"does not answer: {death(error)}"
                self._lost.add(node)
            if not why:
                self._good.add(node)
            answers.append((node, why))
        return answers

    def _differs(self, node: str, there: About) -> str:
        """In what a node differs, for a sentence that begins with it; nothing where it does not."""
        here, (run, corpus) = self._here, self._paths
        names = sorted(
            name for name in {*here.versions, *there.versions} if here.versions.get(name) != there.versions.get(name)
        )
        if names:
            return "has " + ", ".join(
                f"{name} {_short(there, name)} where this process has {_short(here, name)}" for name in names
            )
        if there.corpus is None and is_uri(corpus):
            return f"does not see the corpus {corpus} ({there.trouble}); {REACH}"
        for seen, expected, what, path in (
            (there.run, here.run, "run folder", run),
            (there.corpus, here.corpus, "corpus", corpus),
        ):
            if seen is None:
                return f"does not see the {what} {path}; {SHARE}"
            if seen != expected:
                return f"sees another {what} at {path}; {SHARE}"
        if there.processor != here.processor:
            say(
                f"{self._name(node)} has another processor ({there.processor}) than this machine ({here.processor}): "
                "results may differ in their last bits from a run on equal ones"
            )
        return ""

    def _name(self, node: str) -> str:
        return f"node {self._known[node]}"


def _alive() -> dict[str, Node]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _size(node: Node) -> str:
    resources = node["Resources"]
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"


def _short(of: About, name: str) -> str:
    """A version; of our code, the beginning of its digest."""
    found = of.versions.get(name, "nothing")
    return found[:12] if name == "flsim" else found


def _last_line(error: RayError) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
