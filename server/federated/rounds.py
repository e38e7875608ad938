"""The rounds of a federated run: training, logging, checkpoints, evaluations, and the exchange of requests."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Protocol

import torch
from flwr.app import Message

from flsim.algorithms import micro_cohorts, user_states
from flsim.algorithms.checkpoint import digest_of, latest, round_of
from flsim.algorithms.fedavg import Send
from flsim.algorithms.summation import BranchReply, Reply, RoundRequest, ShardReply, ShardWork, branches
from flsim.algorithms.wire import Address, decode_delta, decode_reply, encode_requests
from flsim.base.errors import InputError, Interrupted, RunFailed
from flsim.base.extensions import custom_code_errors
from flsim.base.files import NewLines
from flsim.base.logs import log, logging_to
from flsim.base.progress import progress, say
from flsim.privacy import ledger
from flsim.privacy.sampling import shard_ranges
from flsim.runs.config import SystemHParams
from flsim.runs.config.base import SHARDS
from flsim.runs.folder import Run, evaluate_checkpoint
from flsim.runs.recovery import hold_lock, recover
from flsim.training.update import Counts, Precision, State, UpdateSum, threads
from server.central import Evaluations, RoundMetrics, supervised
from server.cluster.causes import one_line
from server.cluster.start import Nodes, cluster, nodes, say_where
from server.pool.grid import (
    OWN_CODE_FAILED,
    ClientShare,
    EvaluationInProcess,
    gpu_shares,
    places,
    ray_grid,
    sum_request,
)
from server.stopping import Stop, stopping

# The exchange of a round's requests and replies as Flower messages, and the causes of its failures.
#
# It is not a Strategy of Flower, which averages the received replies, because a missing reply must fail the run.

FIRST = 3600.0  # seconds before the first reply to this process
# smallest deadline in seconds: another process on the machine, or a slow disk, is no reason for a second request
FLOOR = 60.0
FACTOR = 10.0  # multiple of the longest reply so far


class Deadline:
    """The deadline of replies in seconds, counted from their request.

    Without a fixed number, it is ten times the longest reply of this process, at least a minute, and at most an hour or
    twice that reply: a client that hangs in a round of a second costs a minute. It doubles with each attempt, and the
    last one lasts an hour, because a machine can become more than ten times slower, which must not fail a run.
    """

    def __init__(self, fixed: float | None) -> None:
        self._fixed, self._longest = fixed, 0.0

    @property
    def patience(self) -> float:
        """Return the seconds after which the run gives up; no attempt is longer."""
        return max(FIRST, 2 * self._longest) if self._fixed is None else self._fixed

    def of_attempt(self, attempt: int, retries: int) -> float:
        """Return the seconds of an attempt; attempt 0 is the first, and `retries` the last."""
        if self._fixed is not None or not self._longest or attempt == retries:
            return self.patience
        return min(2.0**attempt * max(FLOOR, FACTOR * self._longest), self.patience)

    def saw(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)


POLL = 0.005  # seconds between polls at first; Flower's Grid.send_and_receive would sleep 0.1
START_POLL = 0.02  # seconds between polls during the start of client processes, which need the processor
PATIENT_POLL = 0.1  # seconds between polls for slow replies
NODES_DEADLINE = 600.0  # seconds for the start of a client, as for an evaluator: a busy machine needs minutes
WORTH_SAYING = 60.0  # seconds without a client until a message is printed


class ShardGrid(Protocol):
    """The part of a Flower Grid that rounds need, with a node for each shard."""

    def get_node_ids(self) -> list[int]:
        """Return all nodes while clients run, otherwise none."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their ids."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return replies that have arrived, each once, without waiting."""


class ShardFailed(RunFailed):
    """A failure of a shard in all attempts, or once in custom code, which would fail again."""


@dataclass(frozen=True)
class Exchange:
    """The exchange of requests and replies with nodes."""

    grid: ShardGrid
    shards: int
    # number of consecutive shards that a client process adds; 0 for all. It is used only with a grid that holds arrays.
    branch: int
    address: Address
    deadline: Deadline
    retries: int  # number of repeated requests to a shard after an error or the deadline
    stop: Stop

    def send(self, asked: Sequence[RoundRequest]) -> Iterator[Reply]:
        """Send each request to the node of its shard, and yield replies of shards or of branches in order of arrival.

        A shard that answers with an error, or not within the attempt's deadline, gets the request again, at most
        `retries` times, after 1, 2, 4, ... seconds; if the sum of a branch fails, all its shards do. Requests wait
        until a client runs, at most ten minutes or the longest deadline (RunFailed). ShardFailed if a shard failed in
        every attempt, or at once in custom code; Interrupted if `stop` was set.
        """
        self.stop.check()
        exchanged = _RoundExchange(asked, self.branch)
        yield from self._attempt(asked, partial(self.deadline.of_attempt, 0, self.retries), exchanged)
        for attempt in range(self.retries):
            if not exchanged.failures or exchanged.is_own_code:
                break
            for shard, reason in exchanged.failures.items():
                log.warning("shard asked again", extra={"round": asked[0].round + 1, "shard": shard, "reason": reason})
            self.stop.wait(2**attempt)
            again = [request for request in asked if request.shard in exchanged.failures]
            limit = partial(self.deadline.of_attempt, attempt + 1, self.retries)
            yield from self._attempt(again, limit, exchanged)
        if exchanged.failures:
            shard, reason = min(exchanged.failures.items())
            how = "failed with" if exchanged.is_own_code else f"failed {1 + self.retries} times, last with"
            raise ShardFailed(f"round {asked[0].round + 1}: shard {shard} {how}: {reason}")

    def _attempt(
        self, asked: Sequence[RoundRequest], limit: Callable[[], float], exchanged: "_RoundExchange"
    ) -> Iterator[Reply]:
        """Make one attempt after clients run, and yield replies; set `exchanged.failures`, and record their durations.

        `limit` returns the seconds that a message has, which become fewer for sums if replies of shards were fast.
        """
        nodes = wait_for_nodes(self.grid, self.shards, self.stop, max(self.deadline.patience, NODES_DEADLINE))
        messages = [
            Message(content, nodes[request.shard], "train", group_id=str(request.round + 1))
            for request, content in zip(asked, encode_requests(asked, self.address), strict=True)
        ]
        ids = self.grid.push_messages(messages)
        del messages  # the parameters in them
        last, seconds = time.monotonic(), limit()
        pending = {id_: _Pending((request.shard,), last, seconds) for id_, request in zip(ids, asked, strict=True)}
        exchanged.failures = {}
        while pending:
            self.stop.check()
            replies = self.grid.pull_messages([*pending])
            is_idle = not replies
            while replies:
                message = replies.pop(0)
                its = pending.pop(message.metadata.reply_to_message_id)
                if message.has_error():
                    exchanged.fail(its, message.error.reason or f"Flower error {message.error.code}")
                    if message.error.code == OWN_CODE_FAILED:
                        exchanged.failures = {shard: exchanged.failures[shard] for shard in its.shards}
                        exchanged.is_own_code = True
                        return
                    continue
                try:
                    reply = exchanged.read(message, its)
                except (KeyError, TypeError, ValueError) as error:
                    exchanged.fail(its, f"its reply cannot be read ({type(error).__name__}: {error})")
                    continue
                if its.branch is None:
                    self.deadline.saw(time.monotonic() - its.since)
                if reply is not None:
                    yield reply
                elif (branch := exchanged.held_branch(its.shards[0])) is not None:
                    shards = tuple(exchanged.branches[branch])
                    round_ = str(asked[0].round + 1)
                    (id_,) = self.grid.push_messages([sum_request([nodes[shard] for shard in shards], round_)])
                    pending[id_] = _Pending(shards, time.monotonic(), limit(), branch)
            now = time.monotonic()
            if not is_idle:  # replies that arrived in time may not be fetched yet
                last = now
                continue
            for id_, late in [(id_, its) for id_, its in pending.items() if now - its.since >= its.seconds]:
                exchanged.fail(late, f"no reply within {late.seconds:g} s")
                del pending[id_]
            if pending:
                self.stop.wait(min(max(POLL, (now - last) / 100), PATIENT_POLL))


@dataclass(frozen=True)
class _Pending:
    """A message without an answer, for one shard or for the sum of a branch."""

    shards: tuple[int, ...]  # the shards to which the request is sent again if it fails
    since: float  # `time.monotonic` when it was sent
    seconds: float
    branch: int | None = None  # the branch whose sum it requests; None for a request to a shard


class _RoundExchange:
    """The state of the exchange of a round."""

    def __init__(self, asked: Sequence[RoundRequest], branch: int) -> None:
        self.branches = branches([request.shard for request in asked], branch)  # the requests' shards by branch
        self.failures: dict[int, str] = {}  # the reason for each shard of which the last attempt failed
        self.is_own_code = False  # whether the last failure is an error of custom code
        self._round = asked[0].round if asked else 0
        self._held: dict[int, ShardReply] = {}  # without their sums, which are in client processes

    def fail(self, pending: _Pending, reason: str) -> None:
        """Record the failure of a message; if the sum of a branch failed, the sums of its shards are useless."""
        if pending.branch is not None:
            reason = f"the sum of its branch failed: {reason}"
        for shard in pending.shards:
            self.failures[shard] = reason
            self._held.pop(shard, None)

    def read(self, message: Message, pending: _Pending) -> Reply | None:
        """Return the reply in a message, None for a shard in a branch; ValueError, KeyError, TypeError if wrong."""
        if pending.branch is not None:
            counts = reduce(UpdateSum.merge, [self._held[shard].update for shard in pending.shards])
            update = replace(counts, delta=decode_delta(message.content))
            work = [work for shard in pending.shards for work in self._held.pop(shard).work]
            return BranchReply(pending.branch, update, tuple(work))
        reply = decode_reply(message.content)
        if (reply.round, (reply.shard,)) != (self._round, pending.shards):
            raise ValueError(f"it answers round {reply.round + 1}, shard {reply.shard}")
        if reply.update.delta:
            return reply
        self._held[reply.shard] = reply
        return None

    def held_branch(self, shard: int) -> int | None:
        """Return the branch of a shard if the sums of all its shards are in client processes; otherwise None."""
        branch, shards = next((branch, shards) for branch, shards in self.branches.items() if shard in shards)
        return branch if all(shard in self._held for shard in shards) else None


def wait_for_nodes(grid: ShardGrid, shards: int, stop: Stop, seconds: float) -> list[int]:
    """Return a node id for each shard, in ascending order; nodes exist while clients run."""
    began, is_told = time.monotonic(), False
    while len(nodes := sorted(grid.get_node_ids())) < shards:
        stop.check()
        waited = time.monotonic() - began
        if waited > seconds:
            raise RunFailed(
                f"no client was available for {seconds:g} s; continue the run with --resume when the cluster has "
                "free machines"
            )
        if waited > WORTH_SAYING and not is_told:
            say(f"Waiting up to {seconds:g} s for the first client process to start.")
            is_told = True
        time.sleep(START_POLL)
    return nodes[:shards]


def send_in_process(run: Run, stop: Stop, gpus: float) -> Send:
    """Return a function that trains requests in this process, one shard after another; `gpus` is 0 for a CPU."""
    states, sizes = user_states.UserStates(run.path / user_states.FOLDER), micro_cohorts.MicroCohorts(run.path)
    training = run.federated.training_of(run.users, run.rounds, "cuda" if gpus else "cpu", states, sizes)
    with custom_code_errors():
        engine = training.engine_here(min(1.0, gpus or 1.0))
    worker = f"{socket.gethostname()}/{os.getpid()}"

    def send(asked: Sequence[RoundRequest]) -> Iterator[Reply]:
        for request in asked:
            stop.check()
            began = time.monotonic()
            try:
                with threads(run.config.system.training_threads), custom_code_errors():
                    update = training.update(engine, request)
                run.verify()
            except Exception as error:
                reason = one_line(error)
                raise ShardFailed(f"round {request.round + 1}: shard {request.shard} failed with: {reason}") from error
            yield ShardReply(request.round, request.shard, update, worker, time.monotonic() - began)

    return send


def explain(run: Run, failed: ShardFailed) -> RunFailed:
    """Return the error to raise for a shard that keeps failing: with its cause if a file of the run is damaged."""
    try:
        run.verify()
    except InputError as error:
        file, _, _ = str(error).partition(": ")
        return RunFailed(str(failed) if f"{file}: " in str(failed) else f"{failed}; {error}")
    return failed


def train(grid: ShardGrid | None, run: Run, stop: Stop, gpus: float = 0.0, retrain_lost: bool = False) -> State:
    """Train a run from its newest checkpoint to its last round, and wait for its evaluations.

    Without a grid, this process trains and evaluates. `gpus` are those of an evaluator, or of this process (0: a CPU).
    `stop` requests a checkpoint of the last completed round and the end (Interrupted). Raises InputError for a central
    run, Diverged with the last good checkpoint, RunFailed if a shard or an evaluation failed.
    """
    system = run.federated.system
    # Sums of complete models are limited by memory bandwidth, and a second thread would wait for cores that clients
    # use.
    with hold_lock(run), logging_to(run.path), threads(1):
        newest = latest(run.path / "checkpoints")
        if grid and (newest is None or round_of(newest) < run.rounds):  # else only evaluations can be missing
            wait_for_nodes(grid, system.known_shards, stop, NODES_DEADLINE)
        has_user_states = run.federated.training_of(run.users, run.rounds).method.user_slots
        run.record()  # now, because the run is locked and all checks have passed
        recover(run, retrain_lost)
        if grid is None:
            send_all = send_in_process(run, stop, gpus)
            service = EvaluationInProcess(run.path.resolve(), evaluate_checkpoint)
        else:
            address = Address(str(run.path.resolve()), run.config.digest)
            deadline, service = Deadline(system.deadline), None
            exchange = Exchange(grid, system.known_shards, system.known_branch, address, deadline, system.retries, stop)
            send_all = exchange.send

        def send(asked: Sequence[RoundRequest]) -> Iterator[Reply]:
            if has_user_states:
                asked = [replace(request, oldest_resumable_round=run.oldest_round) for request in asked]
            try:
                yield from send_all(asked)
            except ShardFailed as failed:
                raise explain(run, failed) from failed

        with supervised(run, gpus, service, stop) as evaluations:
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
    sizes.take()  # sizes that earlier processes recorded are known
    with progress(run.name, run.rounds, start=state.round) as advance:
        began, spent, spent_by = time.monotonic(), run.epsilons(state) if state.round else {}, f"by round {state.round}"
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
                # The last epsilon is the one whose assumptions hold.
                advance(state.round, f"{loss}, epsilon {[*spent.values()][-1]:.3g} {spent_by}" if spent else loss)
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


# The launch of a federated run: on a Ray cluster, with client processes on its machines, or in this process.

APP = "clients.app:app"  # by name, because server and clients share only messages
ROUNDING = 1e-4  # the smallest share of a GPU in Ray


def simulate(
    run: Run, address: str | None = None, cpus: int | None = None, head: str | None = None, retrain_lost: bool = False
) -> None:
    """Train a run on Ray, with a Flower node per shard; for arguments and errors, see `server.launch.train`."""
    system, stop = run.federated.system, Stop()
    _say_of_canaries(run)
    with cluster(address, cpus, head), stopping(stop):
        client_gpus, _ = client_gpu_shares(system, [node.get("GPU", 0.0) for node in nodes()])
        share = ClientShare(system.cpus_per_client, client_gpus)
        if not any(share.fits(node) for node in nodes()):
            raise InputError(
                f"a client needs {share.cpus:g} CPUs and {share.gpus:g} GPUs; no Ray node has these resources; "
                "lower system.cpus_per_client or system.gpus_per_client"
            )
        run = with_shards(run, sum(share.fits(node) for node in nodes()))
        shards = run.federated.system.known_shards
        say_what_stays_idle(run.name, share, shards, nodes(), cpus)
        shard_ranges(len(run.users), shards)  # raises an error for more shards than users
        evaluation_gpus = gpus_of_evaluators(run.name, system, nodes(), shards)
        refuse_tf32_without_gpu(run.federated.local.precision, client_gpus)
        machines = Nodes(run.path, run.config.data.corpus, is_local=address is None and head is None)
        machines.check()
        say_where(run.path, address is None and head is None)
        with ray_grid(APP, shards, share, machines, run.federated.system.known_branch > 0) as grid:
            train(grid, run, stop, evaluation_gpus, retrain_lost)


def simulate_in_process(run: Run, retrain_lost: bool = False) -> None:
    """Train like `simulate`, in this process without Ray, one shard after another; evaluations are in between."""
    stop = Stop()
    _say_of_canaries(run)
    with stopping(stop):
        run = with_shards(run, 1)
        asked = run.federated.system.gpus_per_client
        gpus = (1.0 if asked is None else asked) if torch.cuda.is_available() else 0.0
        refuse_tf32_without_gpu(run.federated.local.precision, gpus)
        train(None, run, stop, gpus, retrain_lost)


def _say_of_canaries(run: Run) -> None:
    """Warn if `max_records` excludes copies, whose canaries look less memorized; print the cost of canary users."""
    cap, audit = run.federated.local.max_records, run.federated.audit
    beyond, trained = (0, 0.0) if cap is None else run.users.copies_beyond(cap)
    if beyond:
        say(
            f"local.max_records = {cap} excludes records, including canaries: of {beyond:,} copies that users "
            f"with more records hold, {trained:,.0f} would be trained on in a round of all users"
        )
    if audit.update_canaries:
        say(f"{run.name}: {audit.cost(len(run.users))}")


def client_gpu_shares(system: SystemHParams, gpus: Sequence[float]) -> tuple[float, float]:
    """Return the GPUs of a client and of an evaluator, on nodes with these numbers of GPUs.

    Clients fill nodes by their totals. A single client per GPU leaves a bit for evaluators, which need no CPU.
    """
    return gpu_shares(system.gpus_per_client, system.gpus_for_evaluation, system.evaluators, any(gpus))


def gpus_of_evaluators(name: str, system: SystemHParams, resources: Sequence[dict[str, float]], shards: int) -> float:
    """Return the GPUs of an evaluator, on nodes with "CPU" and "GPU"; 0 if clients use all and none is required.

    Client processes start as in `server.pool.grid.RayGrid`. InputError if the settings put evaluators on GPUs that
    clients use: evaluators would be requested repeatedly, and fail.
    """
    gpus = [node.get("GPU", 0.0) for node in resources]
    client, evaluator = client_gpu_shares(system, gpus)
    if not evaluator:
        return 0.0
    share = ClientShare(system.cpus_per_client, client)
    clients = places(dict(enumerate(map(share.fits, resources))), shards)
    fitting = sum(int((total - clients.count(node) * client) / evaluator + ROUNDING) for node, total in enumerate(gpus))
    if fitting >= system.evaluators:
        return evaluator
    if system.gpus_for_evaluation is not None:
        raise InputError(
            f"clients of system.gpus_per_client = {client:g} leave GPUs for {fitting} of {system.evaluators} "
            f"evaluators of system.gpus_for_evaluation = {evaluator:g}; lower one of the two, or set "
            f"gpus_for_evaluation to 0 to evaluate on CPUs"
        )
    say(
        f"{name}: clients of system.gpus_per_client = {client:g} use all GPUs, so evaluators run on CPUs; to "
        "evaluate on GPUs, do not set gpus_per_client"
    )
    return 0.0


def refuse_tf32_without_gpu(precision: Precision, client_gpus: float) -> None:
    if precision == "tf32" and not client_gpus:
        raise InputError('local.precision "tf32" needs an NVIDIA GPU, but clients have none; set "float32"')


def say_what_stays_idle(
    name: str, share: ClientShare, shards: int, nodes: Sequence[dict[str, float]], cpus: int | None
) -> None:
    """Print that fewer client processes work than the GPUs, or the requested cores, allow."""
    room = sum(share.fits(node) for node in nodes)
    idle = int(sum(node.get("GPU", 0.0) for node in nodes) - shards * share.gpus) if share.gpus else 0
    if room > shards and (idle >= 1 or cpus is not None):
        gpus = f" {idle} GPU{'s' * (idle > 1)} stay{'s' * (idle == 1)} idle;" if idle >= 1 else ""
        say(
            f"{name}: {room} client processes fit, but only {shards} work at the same time, because "
            f"system.shards = {shards};{gpus} a new run with system.shards = {room} would use all"
        )
