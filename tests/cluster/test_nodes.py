"""Nodes of a real cluster: found equal, found different and said so, and missed when they are gone."""

import os
import signal
from pathlib import Path

import pytest
from helpers import TINY, MakeCorpus
from raynodes import free_place, joined, named, older_release, tree
from waiting import wait_until

from flsim.base.errors import InputError, RunFailed
from flsim.base.machine import versions
from server.cluster.nodes import Nodes
from server.cluster.start import cluster


@pytest.mark.nightly
def test_nodes_come_and_go_and_those_that_differ_are_not_used(
    tmp_path: Path, make_corpus: MakeCorpus, capsys: pytest.CaptureFixture[str]
) -> None:
    run, corpus = tmp_path / "run", make_corpus([[[1]]]).path
    run.mkdir()
    settings, manifest = run / "config.toml", corpus / "manifest.json"
    settings.write_text("seed = 0\n" + TINY)
    place, said = free_place(), ""
    node = f"node {place.partition(':')[0]}"
    different = f"has flwr 0.1 but this process has {versions()['flwr']}"

    def ids(nodes: Nodes) -> set[str]:
        nonlocal said
        found = {node["NodeID"] for node in nodes.usable()}
        said += capsys.readouterr().err
        return found

    def refusal() -> str:
        """Why a run would not begin."""
        with pytest.raises(InputError) as refused:
            asked.check()
        return str(refused.value)

    with cluster(cpus=0, head=place):
        nodes = Nodes(run, corpus)
        assert ids(nodes) == set()  # nobody has answered yet
        nodes.check()
        (head,) = ids(nodes)  # it has no CPU for training, but can evaluate
        with joined(place) as start:
            wait_until(lambda: len(ids(nodes)) == 2)
            assert said.count(f"{node} joined: 1 CPUs, 0 GPUs") == 1
            with joined(place, PYTHONPATH=older_release(tmp_path / "old", "flwr")):
                wait_until(lambda: (ids(nodes), "is not used" in said)[1])
                assert len(ids(nodes)) == 2
                assert said.count(f"{node} joined, but is not used, because it {different}") == 1
                asked = Nodes(run, corpus)
                assert refusal() == f"{node} {different}"
            named(tree(start), "raylet").kill()
            wait_until(lambda: ids(nodes) == {head})
            assert said.count(f"{node} left the cluster") == 1

        asked = Nodes(run, corpus)
        settings.rename(run / "hidden")
        assert f"{node} cannot read the run folder {run}; move it to a filesystem that all nodes share" in refusal()
        (run / "hidden").rename(settings)
        asked = Nodes(run, corpus)
        settings.write_text("seed = 1\n" + TINY)
        assert f"{node} has another run folder at {run}" in refusal()
        asked = Nodes(run, corpus)
        manifest.write_text(manifest.read_text() + "\n")
        assert f"{node} has another corpus at {corpus}" in refusal()
        asked = Nodes(run, corpus)
        (corpus / "vocabulary.tsv").unlink()
        assert f"{node} cannot read the corpus {corpus}" in refusal()


@pytest.mark.slow
def test_a_process_that_ray_loses_is_no_bad_input(
    tmp_path: Path, make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that asked for nothing wrong ends with 1, and leaves its folder for another try."""
    run, corpus = tmp_path / "run", make_corpus([[[1]]]).path
    run.mkdir()
    (run / "config.toml").write_text("seed = 0\n")
    with cluster(cpus=1):
        nodes = Nodes(run, corpus)
        monkeypatch.setattr("server.cluster.nodes.environment_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RunFailed, match=r"node 127\.0\.0\.1 does not answer: its process died"):
            nodes.check()
