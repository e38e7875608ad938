"""The loop of rounds, as in the paper's Algorithm 1: draw a cohort, train it, sum, step, save, have it evaluated.

It is not Flower's Strategy: that averages the replies that it got and goes on; here a missing one fails the run.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from threading import Event

from flwr.app import Message
from flwr.serverapp import Grid

from flsim import checkpoint, federated
from flsim.errors import Diverged, RunFailed
from flsim.evaluation.service import EvaluationService
from flsim.federated import ServerState
from flsim.privacy import report
from flsim.progress import progress, say
from flsim.runs import Run, evaluate_checkpoint
from flsim.sampling import draw_cohort, shard_ranges
from flsim.train.update import UpdateSum
from flsim.wire import RoundRequest, ShardReply, decode_reply, encode_request

POLL = 0.005  # seconds; Grid.send_and_receive would sleep 0.1
NODES_DEADLINE = 120.0  # seconds
EVALUATION_DEADLINE = 24 * 3600.0  # seconds to wait, after the last round, for what is still being evaluated


def train(grid: Grid, run: Run, stop: Event, evaluation_gpus: float = 0.0) -> ServerState:
    """Train a run from its newest checkpoint to its last round, and wait for its evaluations.

    Args:
        grid: Flower's message layer, with a node per shard.
        run: the run; its status, checkpoints, rows and log are kept up to date.
        stop: set from outside to end after the current poll.
        evaluation_gpus: GPUs of the evaluator; 0 evaluates on a CPU.

    Raises:
        Diverged: values that are not finite; names the round and the last good checkpoint.
        RunFailed: a shard kept failing, an evaluation failed, or `stop` was set.
    """
    system = run.config.system
    nodes = wait_for_nodes(grid, system.shards)
    device = "cuda" if evaluation_gpus else "cpu"
    work = partial(evaluate_checkpoint, run.path.resolve(), device=device)
    evaluation = EvaluationService(work, evaluation_gpus)

    def send(asked: Sequence[RoundRequest]) -> list[ShardReply]:
        return exchange(grid, nodes, asked, system.deadline, system.retries, stop)

    state = run.latest_state()
    run.forget_rounds_after(state.round)
    try:
        state = train_rounds(run, state, send, evaluation)
        finish_evaluations(run, evaluation)
    except Diverged as error:
        with suppress(RunFailed):
            evaluation.drain(EVALUATION_DEADLINE)  # what was good before still counts
        newest = checkpoint.latest(run.path / "checkpoints")
        reason = f"{error}; last good checkpoint: {newest or 'none'}"
        run.mark("diverged", reason)
        raise Diverged(reason) from error
    except BaseException as error:
        run.mark("failed", str(error) or type(error).__name__)
        raise
    finally:
        evaluation.close()
    run.mark("completed")
    return state


Send = Callable[[Sequence[RoundRequest]], list[ShardReply]]


def train_rounds(run: Run, state: ServerState, send: Send, evaluation: EvaluationService) -> ServerState:
    """All rounds from `state` on; `send` turns a round's requests into as many replies, in the same order."""
    config, rounds, population = run.config, run.config.training.rounds, len(run.users)
    for path in run.unevaluated():
        evaluation.submit(path.resolve())
    with progress(run.name, rounds, start=state.round) as advance:
        began, spent, spent_by = time.monotonic(), run.epsilons(state), f"by round {state.round}"
        while state.round < rounds:
            replies = send(requests(run, state))
            total = reduce(UpdateSum.merge, (reply.update for reply in replies), UpdateSum.zero(state.params))
            clip = state.clip
            state = federated.apply(state, total, config.training, config.privacy, config.seed, population)
            evaluated = run.is_evaluated_at(state.round)
            if evaluated:  # accounting takes a second or so
                spent, spent_by = run.epsilons(state), f"by round {state.round}"
            now = time.monotonic()
            run.log_round(
                round=state.round,
                **_about(total, clip),
                epsilon=spent if evaluated and spent else None,
                seconds=round(now - began, 3),
                workers=sorted({reply.worker for reply in replies}),
            )
            began = now
            if run.is_saved_at(state.round):
                path = run.save(state)
                run.mark("running")
                if evaluated:
                    evaluation.submit(path.resolve())
            _go_on_without(evaluation.poll)
            loss = f"loss {total.loss / total.tokens:.3f}" if total.tokens else "nobody came"
            advance(state.round, f"{loss}, {report.note(spent)} {spent_by}" if spent else loss)
    if spent:
        say(f"{run.name}: {report.sentence(spent, config.training.sampler, run.delta)}")
    return state


def _about(total: UpdateSum, clip: float | None) -> dict[str, float | None]:
    """A round in numbers, for the log; null where there is nothing to tell."""
    return {
        "loss": total.loss / total.tokens if total.tokens else None,
        "users": total.users,
        "examples": total.examples,
        "update_norm": total.norms / total.users if total.users else None,
        "clip": clip,
        "clipped": total.clipped / total.users if clip is not None and total.users else None,
    }


def finish_evaluations(run: Run, evaluation: EvaluationService) -> None:
    """Wait for what is still being evaluated.

    Raises:
        Diverged: as `EvaluationService.drain`.
        RunFailed: evaluations failed, now or during training; `--resume` does them again.
    """
    with progress(f"{run.name}: evaluating", total=1) as advance:
        until = time.monotonic() + EVALUATION_DEADLINE
        while evaluation.pending and time.monotonic() < until:
            _go_on_without(partial(evaluation.drain, until - time.monotonic()))
        advance(1)
    missing = run.unevaluated()
    if missing:
        raise RunFailed(f"{missing[0].name} could not be evaluated; `flsim run --resume` tries again")


def _go_on_without(look: Callable[[], object]) -> None:
    """Evaluation never feeds the loop: one that failed is said, and training goes on."""
    try:
        look()
    except Diverged:
        raise
    except RunFailed as error:
        say(str(error))


def requests(run: Run, state: ServerState) -> list[RoundRequest]:
    """One request per shard that holds users of this round's cohort, in shard order."""
    population = len(run.users)
    training = run.config.training
    cohort = draw_cohort(run.config.seed, state.round, population, training.cohort, training.sampler)
    return [
        RoundRequest(str(run.path.resolve()), run.config.digest, state.round, shard, users, state.params, state.clip)
        for shard, (first, last) in enumerate(shard_ranges(population, run.config.system.shards))
        if len(users := cohort[(first <= cohort) & (cohort < last)])
    ]


def exchange(
    grid: Grid, nodes: Sequence[int], asked: Sequence[RoundRequest], deadline: float, retries: int, stop: Event
) -> list[ShardReply]:
    """Send each request to its shard's node and collect all replies, in the requests' order.

    A shard that answers with an error, or not within `deadline` seconds, is asked again, at most `retries` times, after
    1, 2, 4, ... seconds: a client process that died takes about that long to come back.

    Raises:
        RunFailed: a shard failed each time, with its last reason; or `stop` was set.
    """
    replies: dict[int, ShardReply] = {}
    failures = _ask(grid, nodes, asked, deadline, stop, replies)
    for attempt in range(retries):
        if not failures:
            break
        stop.wait(2**attempt)
        failures = _ask(grid, nodes, [r for r in asked if r.shard in failures], deadline, stop, replies)
    if failures:
        shard, reason = min(failures.items())
        raise RunFailed(f"round {asked[0].round + 1}: shard {shard} failed {1 + retries} times, last with: {reason}")
    return [replies[request.shard] for request in asked]


def _ask(
    grid: Grid,
    nodes: Sequence[int],
    asked: Sequence[RoundRequest],
    deadline: float,
    stop: Event,
    replies: dict[int, ShardReply],
) -> dict[int, str]:
    """One attempt: fills `replies`, returns the reasons of the shards that failed."""
    messages = [
        Message(encode_request(request), dst_node_id=nodes[request.shard], message_type="train") for request in asked
    ]
    shard_of = dict(zip(grid.push_messages(messages), (request.shard for request in asked), strict=True))
    failures: dict[int, str] = {}
    until = time.monotonic() + deadline
    while shard_of and time.monotonic() < until:
        if stop.is_set():
            raise RunFailed("interrupted; `flsim run --resume` continues from the newest checkpoint")
        for message in grid.pull_messages(list(shard_of)):
            shard = shard_of.pop(message.metadata.reply_to_message_id)
            if message.has_error():
                failures[shard] = message.error.reason or f"Flower error {message.error.code}"
            else:
                replies[shard] = decode_reply(message.content)
        time.sleep(POLL)
    return failures | dict.fromkeys(shard_of.values(), f"no reply within {deadline:g} s")


def wait_for_nodes(grid: Grid, shards: int) -> list[int]:
    """Ids of as many nodes as there are shards, in ascending order."""
    until = time.monotonic() + NODES_DEADLINE
    while len(nodes := sorted(grid.get_node_ids())) < shards:
        if time.monotonic() > until:
            raise RunFailed(
                f"only {len(nodes)} of {shards} Flower nodes came up within {NODES_DEADLINE:g} s; "
                f"start more of them, or lower system.shards"
            )
        time.sleep(POLL)
    return nodes[:shards]
