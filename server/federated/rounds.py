"""The rounds of a federated run: training, logging, checkpoints and evaluations."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid

from flsim.algorithms import micro_cohorts
from flsim.algorithms.checkpoint import digest_of, latest, round_of
from flsim.algorithms.fedavg import Send
from flsim.algorithms.summation import Reply, RoundRequest, ShardWork
from flsim.algorithms.wire import Address
from flsim.base.errors import Interrupted
from flsim.base.files import NewLines
from flsim.base.logs import log, logging_to
from flsim.base.progress import progress, say
from flsim.privacy import ledger
from flsim.runs.config.federated import SHARDS
from flsim.runs.folder import Run
from flsim.runs.locks import hold_lock
from flsim.runs.recovery import recover
from flsim.training.local import threads
from flsim.training.state import State
from flsim.training.update import Counts
from server.federated.exchange import NODES_DEADLINE, Deadline, Exchange, ShardFailed, explain, wait_for_nodes
from server.pool.evaluations import EvaluationInProcess
from server.stopping import Stop
from server.supervision import Evaluations, RoundMetrics, supervised


def train(
    grid: Grid,
    run: Run,
    stop: Stop,
    evaluation_gpus: float = 0.0,
    retrain_lost: bool = False,
    service: EvaluationInProcess | None = None,
) -> State:
    """Train a run from its newest checkpoint to its last round, and wait for its evaluations.

    `stop` requests a checkpoint of the last completed round and the end (Interrupted). Evaluations are in this process
    (`service`), or in processes with `evaluation_gpus` (0: a CPU). Raises InputError for a central run, Diverged with
    the last good checkpoint, RunFailed if a shard or an evaluation failed.
    """
    system = run.federated.system
    # Sums of complete models are limited by memory bandwidth, and a second thread would wait for cores that clients
    # use.
    with hold_lock(run), logging_to(run.path), threads(1):
        newest = latest(run.path / "checkpoints")
        if newest is None or round_of(newest) < run.rounds:  # else only evaluations can be missing, without clients
            wait_for_nodes(grid, system.known_shards, stop, NODES_DEADLINE)
        has_user_states = run.federated.training_of(run.users, run.rounds).method.user_slots
        run.record()  # now, because the run is locked and all checks have passed
        recover(run, retrain_lost)
        address = Address(str(run.path.resolve()), run.config.digest)
        exchange = Exchange(
            grid,
            shards=system.known_shards,
            branch=system.known_branch,
            address=address,
            deadline=Deadline(system.deadline),
            retries=system.retries,
            stop=stop,
        )

        def send(asked: Sequence[RoundRequest]) -> Iterator[Reply]:
            if has_user_states:
                asked = [replace(request, oldest_resumable_round=run.oldest_round) for request in asked]
            try:
                yield from exchange.send(asked)
            except ShardFailed as failed:
                raise explain(run, failed) from failed

        with supervised(run, evaluation_gpus, service, stop) as evaluations:
            return train_rounds(run, run.latest_state(), send, evaluations)


def with_shards(run: Run, processes: int) -> Run:
    """Return the run with the numbers of shards and of shards in a branch, from its settings or chosen now.

    `train` records the choice for the `processes` that fit. A run with completed rounds keeps the order of its sums:
    without a recorded number of shards, it had 2; without recorded branches, it had none.
    """
    system, has_begun = run.federated.system, run.last_round or latest(run.path / "checkpoints")
    if system.shards is not None and (system.branch is not None or has_begun):
        return run
    decided = run.federated.with_shards(SHARDS if has_begun else processes, len(run.users))
    return replace(run, config=decided)


def train_rounds(run: Run, state: State, send: Send, evaluations: Evaluations) -> State:
    """Train all rounds from `state` on; `send` turns a round's requests into replies, in any order."""
    training, metrics = run.federated.training_of(run.users, run.rounds), RoundMetrics(run)
    sizes = NewLines(run.path / micro_cohorts.FILE)
    sizes.take()  # epsilons of earlier processes are known
    with progress(run.name, run.rounds, start=state.round) as advance:
        began, spent, spent_by = time.monotonic(), run.epsilons(state), f"by round {state.round}"
        try:
            for round_ in training.rounds(state, run.rounds, send):
                state, counts = round_.state, round_.total.counts
                evaluated = run.is_evaluated_at(state.round)
                if evaluated:  # otherwise accounting, which takes about a second, is skipped
                    spent, spent_by = run.epsilons(state), f"by round {state.round}"
                now = time.monotonic()
                line = run.log_round(
                    round=state.round,
                    **_logged(counts, round_.clip),
                    mean_rms=_brief(round_.step.rms),
                    effective_step=_brief(round_.step.ratio),
                    epsilon=spent if evaluated and spent else None,
                    seconds=round(now - began, 3),
                    overhead=round(now - began - _training_seconds(round_.work), 3),
                    workers=sorted({work.worker for work in round_.work}),
                    digest=digest_of(state),
                    **({"wraps": round_.step.wraps} if round_.step.wraps else {}),
                )
                if round_.step.wraps:
                    say(
                        f"{run.name}: round {state.round}: {round_.step.wraps:,} values of the sum exceeded the "
                        "modulus; raise bits or lower steps in privacy.noise_options",
                        failure="values beyond the modulus",
                    )
                metrics.report(line)
                began = now
                say_micro_cohorts(run.name, sizes.take())
                if run.is_saved_at(state.round):
                    evaluations.saved(run.save(state))
                evaluations.poll()
                loss = f"loss {counts.loss / counts.tokens:.3f}" if counts.tokens else "empty cohort"
                advance(state.round, f"{loss}, {ledger.note(spent)} {spent_by}" if spent else loss)
        except Interrupted:
            if state.round and not run.is_saved_at(state.round):  # so that the last round is not trained again
                run.save(state)
            log.info("interrupted", extra={"round": state.round})
            raise
    if spent:
        say(f"{run.name}: {ledger.sentence(spent, run.config.sampler, run.delta)}")
    return state


def say_micro_cohorts(name: str, lines: Sequence[Any]) -> None:
    """Log how many users clients train at once, and print when memory ran out."""
    for line in filter(micro_cohorts.is_line, lines):
        if "shard" not in line:
            log.info("micro-cohort", extra={"users": line["users"], "device": str(line.get("device"))})
            continue
        say(
            f"{name}: memory ran out in round {line['round'] + 1}; from then on {line['users']:,} users of "
            f"shard {line['shard']} train together, also after a resume; a smaller system.micro_cohort would "
            "avoid this",
            round=line["round"] + 1,
            shard=line["shard"],
            users=line["users"],
        )


def _logged(counts: Counts, clip: float | None) -> dict[str, float | None]:
    """Return the numbers of a round for the log; null if there are none."""
    return {
        "loss": counts.loss / counts.tokens if counts.tokens else None,
        "users": counts.users,
        "examples": counts.examples,
        "update_norm": counts.norms / counts.users if counts.users else None,
        "clip": clip,
        "left_out": counts.left_out,
        "clipped": counts.clipped / counts.users if clip is not None and counts.users else None,
    }


def _brief(value: float | None) -> float | None:
    """Return six significant digits, which is what float32 parameters have."""
    return None if value is None else float(f"{value:.6g}")


def _training_seconds(work: Sequence[ShardWork]) -> float:
    """Return the seconds that the busiest client process trained; a process trains its shards one after another."""
    by_worker: defaultdict[str, float] = defaultdict(float)
    for shard in work:
        by_worker[shard.worker] += shard.seconds
    return max(by_worker.values(), default=0.0)
