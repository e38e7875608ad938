"""The loop of rounds, as in the paper's Algorithm 1: draw a cohort, train it, sum, step, save, have it evaluated.

It is not Flower's Strategy: that averages the replies that it got and goes on; here a missing one fails the run.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import digest_of
from flsim.algorithms.fedavg import ServerState
from flsim.base.errors import InputError, Interrupted, RunFailed
from flsim.base.logs import log, logging_to
from flsim.base.progress import progress, say
from flsim.privacy import report
from flsim.privacy.sampling import draw_cohort, shard_ranges
from flsim.runs.folder import Run
from flsim.runs.locks import alone
from flsim.runs.recovery import recover
from flsim.training.update import UpdateSum
from flsim.wire import RoundRequest, ShardReply, decode_reply, encode_requests
from server.federated.deadline import Deadline
from server.federated.failures import ShardFailed, blame
from server.stopping import Stop
from server.supervision import Evaluations, keep, supervised

POLL = 0.005  # seconds, at first; Grid.send_and_receive would sleep 0.1
PATIENT_POLL = 0.1  # seconds, where replies take long
NODES_DEADLINE = 120.0  # seconds
WORTH_SAYING = 60.0  # seconds without a client


def train(grid: Grid, run: Run, stop: Stop, evaluation_gpus: float = 0.0, retrain_lost: bool = False) -> ServerState:
    """Train a run from its newest checkpoint to its last round, and wait for its evaluations.

    Args:
        grid: Flower's message layer, with a node per shard.
        run: the run; its status, checkpoints, rows and log are kept up to date.
        stop: set from outside to write a checkpoint of the last completed round and end.
        evaluation_gpus: GPUs of the evaluator; 0 evaluates on a CPU.
        retrain_lost: as of `flsim.runs.recovery.recover`.

    Raises:
        InputError: it is a central run.
        Diverged: values that are not finite; names the round and the last good checkpoint.
        Interrupted: `stop` was set.
        RunFailed: a shard kept failing, or an evaluation failed.
    """
    system = run.federated.system
    deadline = Deadline(system.deadline)

    def ask_once(request: RoundRequest) -> dict[int, str]:
        return _ask(grid, nodes, [request], deadline, deadline.patience, stop, {})

    def send(asked: Sequence[RoundRequest]) -> list[ShardReply]:
        try:
            return exchange(grid, nodes, asked, deadline, system.retries, stop)
        except ShardFailed as failed:
            raise blame(run, failed, ask_once) from failed

    with alone(run), logging_to(run.path), one_thread():
        nodes = wait_for_nodes(grid, system.shards, stop, NODES_DEADLINE)
        recover(run, retrain_lost)
        state = run.latest_state()
        if not isinstance(state, ServerState):
            raise InputError(f"{run.path}: its newest checkpoint is of central training; start a new run")
        with supervised(run, evaluation_gpus, stop=stop) as evaluations:
            return train_rounds(run, state, send, evaluations)


Send = Callable[[Sequence[RoundRequest]], list[ShardReply]]


def train_rounds(run: Run, state: ServerState, send: Send, evaluations: Evaluations) -> ServerState:
    """All rounds from `state` on; `send` turns a round's requests into as many replies, in the same order."""
    config, rounds, population = run.federated, run.rounds, len(run.users)
    with progress(run.name, rounds, start=state.round) as advance:
        began, spent, spent_by = time.monotonic(), run.epsilons(state), f"by round {state.round}"
        while state.round < rounds:
            try:
                replies = send(requests(run, state))
            except Interrupted:
                leave(run, state)
                raise
            total = sum_of([reply.update for reply in replies], state)
            clip = state.clip
            state = fedavg.apply(state, total, config.training, config.privacy, config.seed, population, rounds)
            evaluated = run.is_evaluated_at(state.round)
            if evaluated:  # accounting takes a second or so
                spent, spent_by = run.epsilons(state), f"by round {state.round}"
            now = time.monotonic()
            run.log_round(
                round=state.round,
                **_about(total, clip),
                epsilon=spent if evaluated and spent else None,
                seconds=round(now - began, 3),
                overhead=round(now - began - _training_seconds(replies), 3),
                workers=sorted({reply.worker for reply in replies}),
                digest=digest_of(state),
            )
            began = now
            if run.is_saved_at(state.round):
                keep(run, state, evaluations)
            evaluations.poll()
            loss = f"loss {total.loss / total.tokens:.3f}" if total.tokens else "nobody came"
            advance(state.round, f"{loss}, {report.note(spent)} {spent_by}" if spent else loss)
    if spent:
        say(f"{run.name}: {report.sentence(spent, config.training.sampler, run.delta)}")
    return state


def leave(run: Run, state: ServerState) -> None:
    """Save the last completed round, so that none is trained again."""
    if state.round and not run.is_saved_at(state.round):
        run.save(state)
    log.info("interrupted", extra={"round": state.round})


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of whole models wait for memory: a second thread would only wait for cores that clients keep busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sum_of(updates: Sequence[UpdateSum], state: ServerState) -> UpdateSum:
    """Of a round, in shard order: it does not depend on who replied first."""
    return reduce(UpdateSum.merge, updates) if updates else UpdateSum.zero(state.params)


def _about(total: UpdateSum, clip: float | None) -> dict[str, float | None]:
    """A round in numbers, for the log; null where there is nothing to tell."""
    return {
        "loss": total.loss / total.tokens if total.tokens else None,
        "users": total.users,
        "examples": total.examples,
        "update_norm": total.norms / total.users if total.users else None,
        "clip": clip,
        "left_out": total.left_out,
        "clipped": total.clipped / total.users if clip is not None and total.users else None,
    }


def _training_seconds(replies: Sequence[ShardReply]) -> float:
    """How long the busiest client process trained; a process trains its shards one after another."""
    by_worker: defaultdict[str, float] = defaultdict(float)
    for reply in replies:
        by_worker[reply.worker] += reply.seconds
    return max(by_worker.values(), default=0.0)


def requests(run: Run, state: ServerState) -> list[RoundRequest]:
    """One request per shard that holds users of this round's cohort, in shard order."""
    population = len(run.users)
    config, training = run.federated, run.federated.training
    cohort = draw_cohort(config.seed, state.round, population, training.cohort, training.sampler)
    return [
        RoundRequest(str(run.path.resolve()), config.digest, state.round, shard, users, state.params, state.clip)
        for shard, (first, last) in enumerate(shard_ranges(population, config.system.shards))
        if len(users := cohort[(first <= cohort) & (cohort < last)])
    ]


def exchange(
    grid: Grid, nodes: Sequence[int], asked: Sequence[RoundRequest], deadline: Deadline, retries: int, stop: Stop
) -> list[ShardReply]:
    """Send each request to its shard's node and collect all replies, in the requests' order.

    A shard that answers with an error, or not within the attempt's deadline, is asked again, at most `retries` times,
    after 1, 2, 4, ... seconds. Nobody is asked before a client is there, and the seconds count from then on.

    Raises:
        ShardFailed: a shard failed each time, with its last reason.
        RunFailed: no client came back, in two minutes or the longest deadline, whichever is longer.
        Interrupted: `stop` was set.
    """
    stop.check()
    replies: dict[int, ShardReply] = {}
    failures = _ask(grid, nodes, asked, deadline, deadline.of_attempt(0, retries), stop, replies)
    for attempt in range(retries):
        if not failures:
            break
        for shard, reason in failures.items():
            log.warning("shard asked again", extra={"round": asked[0].round + 1, "shard": shard, "reason": reason})
        stop.wait(2**attempt)
        seconds, again = deadline.of_attempt(attempt + 1, retries), [each for each in asked if each.shard in failures]
        failures = _ask(grid, nodes, again, deadline, seconds, stop, replies)
    if failures:
        shard, reason = min(failures.items())
        raise ShardFailed(next(request for request in asked if request.shard == shard), 1 + retries, reason)
    return [replies[request.shard] for request in asked]


def _ask(
    grid: Grid,
    nodes: Sequence[int],
    asked: Sequence[RoundRequest],
    deadline: Deadline,
    seconds: float,
    stop: Stop,
    replies: dict[int, ShardReply],
) -> dict[int, str]:
    """One attempt of so many seconds, once clients are there.

    Fills `replies`, tells the deadline how long each took, and returns the reasons of the shards that failed.
    """
    wait_for_nodes(grid, len(nodes), stop, max(deadline.patience, NODES_DEADLINE))
    messages = [
        Message(content, nodes[request.shard], "train", group_id=str(request.round + 1))
        for request, content in zip(asked, encode_requests(asked), strict=True)
    ]
    shard_of = dict(zip(grid.push_messages(messages), (request.shard for request in asked), strict=True))
    failures: dict[int, str] = {}
    began = time.monotonic()
    while shard_of and (waited := time.monotonic() - began) < seconds:
        stop.check()
        for message in grid.pull_messages(list(shard_of)):
            shard = shard_of.pop(message.metadata.reply_to_message_id)
            if message.has_error():
                failures[shard] = message.error.reason or f"Flower error {message.error.code}"
                continue
            try:
                replies[shard] = _reply(message, asked[0].round, shard)
            except (KeyError, TypeError, ValueError) as error:
                failures[shard] = f"its reply cannot be read ({type(error).__name__}: {error})"
            else:
                deadline.saw(waited)
        if shard_of:
            stop.wait(min(max(POLL, waited / 100), PATIENT_POLL))
    return failures | dict.fromkeys(shard_of.values(), f"no reply within {seconds:g} s")


def _reply(message: Message, round_: int, shard: int) -> ShardReply:
    """Raises ValueError and the like where it is not an answer to what was asked."""
    reply = decode_reply(message.content)
    if (reply.round, reply.shard) != (round_, shard):
        raise ValueError(f"it answers round {reply.round + 1}, shard {reply.shard}")
    return reply


def wait_for_nodes(grid: Grid, shards: int, stop: Stop, seconds: float) -> list[int]:
    """Ids of as many nodes as there are shards, in ascending order; they are there while clients are."""
    began, is_told = time.monotonic(), False
    while len(nodes := sorted(grid.get_node_ids())) < shards:
        stop.check()
        waited = time.monotonic() - began
        if waited > seconds:
            raise RunFailed(f"no client for {seconds:g} s; continue the run once there are machines for them")
        if waited > WORTH_SAYING and not is_told:
            say(f"no client runs; waits for one, for {seconds:g} s at most")
            is_told = True
        time.sleep(POLL)
    return nodes[:shards]
