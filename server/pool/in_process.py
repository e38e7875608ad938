"""Evaluation in this process, for runs without Ray."""

import math
import time
from pathlib import Path

import torch

from flsim.base.errors import Diverged
from flsim.results.evaluations import Evaluation, Outcome, log_evaluation
from server.pool.evaluations import Work


class EvaluationInProcess:
    """A service like `server.pool.evaluations.EvaluationService`, which evaluates a checkpoint when it is submitted.

    Args:
        work: see `EvaluationService`.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._ended: list[Evaluation] = []

    def pending(self, run: Path) -> int:  # noqa: ARG002 (the interface of a service for several runs)
        """Return the number of submissions whose outcome no `poll` or `drain` has returned."""
        return len(self._ended)

    def submit(self, run: Path, checkpoint: Path) -> bool:
        """Evaluate a checkpoint, and return True; a failure is the outcome."""
        began, cpu, threads = time.monotonic(), time.process_time(), torch.get_num_threads()
        torch.set_num_threads(1)  # as in evaluators, which gives the same bits
        outcome: Outcome = "stored"
        reason = None
        try:
            self._work(run, checkpoint)
        except Diverged as error:
            outcome, reason = "diverged", str(error)
        except Exception as error:  # whatever it is, training goes on
            outcome, reason = "failed", str(error) or repr(error)
        finally:
            torch.set_num_threads(threads)
        seconds, spent = time.monotonic() - began, time.process_time() - cpu
        about = Evaluation(checkpoint.name, outcome, 1, round(seconds, 3), round(time.time(), 3), spent, reason)
        log_evaluation(run, about)
        self._ended.append(about)
        return True

    def poll(self, run: Path) -> list[Evaluation]:  # noqa: ARG002
        """Return the outcomes since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drain(self, run: Path, timeout: float = math.inf) -> list[Evaluation]:  # noqa: ARG002 (nothing is waited for)
        """Return outcomes like `poll`."""
        return self.poll(run)

    def forget(self, run: Path) -> None:  # noqa: ARG002
        """Drop outcomes that were not asked for."""
        self._ended.clear()

    def close(self) -> None:
        """Drop outcomes that were not asked for."""
        self._ended.clear()
