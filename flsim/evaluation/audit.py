"""The audit of models from other systems: any model with `start` and `step` of `LanguageModel`.

All outputs of such a model are checked before they are used, because a model in training mode, or with logits instead
of log-probs, gives plausible but wrong ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flsim.base.errors import Diverged, InputError
from flsim.canaries.spec import Canary
from flsim.data.records import Users
from flsim.data.vocabulary import SPECIAL_TOKENS, Layout
from flsim.evaluation import evaluate
from flsim.models.language_model import LanguageModel, ModelSettings, State, TrainableModel
from flsim.results.rows import REFERENCES, Row

CPU = torch.device("cpu")
SLACK = 1e-2  # nats tolerance of scores for other batch sizes, TF32 or other kernels
IMPOSSIBLE = torch.finfo(torch.float16).min  # nats, in every type
OTHERS, NEVER = -1, -2  # in place of an id that a module predicts
SUM_SLACK = 1e-3  # tolerance of the sum of probabilities for rounding


class ForwardModel(nn.Module):
    """A causal module as a `LanguageModel`; each step reads all tokens so far again.

    It is simple, and correct for any map from tokens to logits. A model with a cache is faster with custom `start` and
    `step`. A state is the tokens so far, at most `context` of them.

    Args:
        module: the module; if `ids` are given, it has its own ids.
        context: number of tokens that it reads.
        ids: int64 [2, V], the ids that the module reads for each token id, and those that it predicts: `OTHERS` for
            all ids that are not named, and `NEVER`; None if they are the same.
    """

    _ids: Tensor | None

    def __init__(self, module: nn.Module, context: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.module, self.context = module, context
        self.register_buffer("_ids", ids, persistent=False)

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        tokens = tokens[:, -self.context :]
        output = self.module(tokens if self._ids is None else self._ids[0, tokens])
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
            raise InputError(
                f"forward must map tokens [B, T] to logits [B, T, V]; for {list(tokens.shape)}, it returned "
                f"{_shape(logits)}"
            )
        last = logits[:, -1]
        log_probs = last.to(torch.promote_types(last.dtype, torch.float32)).log_softmax(-1)
        return (tokens,), log_probs if self._ids is None else _renumbered(log_probs, self._ids[1])

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return self.start(torch.cat([state[0], tokens[:, None]], dim=1))


def _renumbered(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probs [N, V] from those of a module's ids [N, W]; ids is int64 [V], see `ForwardModel`."""
    size = log_probs.shape[1]
    if int(ids.max()) >= size:
        raise InputError(f"words name the id {int(ids.max())}, but the module predicts {size} ids; correct the words")
    named = log_probs[:, ids.clamp(min=0)].masked_fill(ids == NEVER, -torch.inf)
    others = log_probs.index_fill(1, ids[ids >= 0], -torch.inf).logsumexp(1)
    return torch.where(ids == OTHERS, others[:, None], named)


def from_forward(
    module: nn.Module,
    context: int,
    words: Sequence[int] | None = None,
    bos: int | None = None,
    eos: int | None = None,
    layout: str = "tff",
) -> ForwardModel:
    """Return a `LanguageModel` of a module whose forward maps int64 [B, T] to logits [B, T, V].

    A module with other token ids, such as subwords, needs `words` and `bos`. All further ids of the module together are
    the unknown word, so the probabilities of words are those of the module.

    Args:
        module: causal module; logits at a position are of the next token. It may also return an object with `.logits`.
        context: number of tokens that it reads; for longer sequences, it reads the last tokens. BOS and the longest
            canary are enough for canaries; for utility BOS and a record (20 words).
        words: the module's id of each word of canaries, in the order of the vocabulary.
        bos: the module's id at the beginning of a sequence, with `words`.
        eos: the module's id at the end of a sequence, for utility.
        layout: name of the layout of token ids, with `words`.

    Raises:
        InputError: the context is below 1, or ids are negative or repeat.
    """
    if context < 1:
        raise InputError(f"context must be at least 1 token, found {context}")
    if words is None:
        return ForwardModel(module, context)
    known = [*words, *(() if eos is None else (eos,))]
    if bos is None or bos < 0 or min(known, default=-1) < 0 or len(set(known)) < len(known):
        raise InputError("words need different ids of the module, none below 0, and the id of bos")
    ours = Layout(len(words) + SPECIAL_TOKENS, name=layout)
    predicted = torch.full((ours.vocabulary_size,), NEVER)
    predicted[ours.first_word : ours.last_word + 1] = torch.tensor(list(words))
    predicted[ours.oov], predicted[ours.eos] = OTHERS, NEVER if eos is None else eos
    read = torch.where(predicted < 0, bos, predicted)
    return ForwardModel(module, context, torch.stack([read, predicted]))


class Checked(TrainableModel):
    """Any model with `start` and `step`, whose outputs are checked; it has no gradients. Failures raise InputError."""

    def __init__(self, model: LanguageModel, layout: Layout, name: str, device: torch.device = CPU) -> None:
        for method in ("start", "step"):
            if not callable(getattr(model, method, None)):
                raise InputError(
                    f"{name}: returned a {type(model).__name__}, which has no method {method}; give it start "
                    "and step, or wrap a module with flsim.evaluation.audit.from_forward(module, context)"
                )
        super().__init__(layout.vocabulary_size, ModelSettings())
        self.model = model.to(device).eval() if isinstance(model, nn.Module) else model
        self.layout, self.name, self._device = layout, name, device

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probs [B, T, V], token after token."""
        state, log_probs = self.start(tokens[:, :1])
        columns = [log_probs]
        for column in tokens[:, 1:].T:
            state, log_probs = self.step(state, column)
            columns.append(log_probs)
        return torch.stack(columns, 1)

    def start(self, tokens: Tensor) -> tuple[State, Tensor]:
        return self._ask("start", len(tokens), tokens)

    def step(self, state: State, tokens: Tensor) -> tuple[State, Tensor]:
        return self._ask("step", len(tokens), state, tokens)

    @torch.no_grad()
    def _ask(self, method: str, rows: int, *arguments: Any) -> tuple[State, Tensor]:
        try:
            answer = getattr(self.model, method)(*arguments)
        except Exception as error:
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"{self.name}: {method} failed with {reason}") from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._wrong(method, f"must return (state, log_probs), found {_shape(answer)}")
        state, log_probs = answer
        if not isinstance(state, tuple) or any(not isinstance(p, Tensor) or p.shape[:1] != (rows,) for p in state):
            raise self._wrong(method, f"must return a state that is a tuple of tensors with a row for each of {rows}")
        self._check(method, log_probs, rows)
        # Padding and BOS can have probability 0, because attacks do not score them; infinity is replaced, because it
        # would look like an overflow.
        return state, log_probs.masked_fill(log_probs.isneginf(), IMPOSSIBLE)

    def _check(self, method: str, log_probs: Any, rows: int) -> None:
        size, layout = self.layout.vocabulary_size, self.layout
        if not isinstance(log_probs, Tensor) or not log_probs.is_floating_point():
            raise self._wrong(method, f"must return log-probs, a tensor of floats, found {_shape(log_probs)}")
        if log_probs.shape != (rows, size):
            raise self._wrong(
                method, f"returned log-probs {_shape(log_probs)}, but the vocabulary requires [{rows}, {size}]"
            )
        if bool(log_probs.isnan().any()):
            raise self._wrong(method, "returned log-probs that are NaN")
        # The last bits of a half's log-probs are not precise enough for this sum.
        slack = max(SUM_SLACK, 8 * torch.finfo(log_probs.dtype).eps)
        sums = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32)).logsumexp(1).exp()
        worst = float(sums[(sums - 1).abs().argmax()])
        if not abs(worst - 1) <= slack:
            raise self._wrong(
                method,
                f"returned log-probs whose probabilities sum to {worst:.6g}, not to 1; logits need a log_softmax",
            )
        if not bool(log_probs[:, layout.first_word : layout.last_word + 1].isfinite().all()):
            raise self._wrong(method, "gave a word the probability 0, so its log-perplexity is infinite")

    def _wrong(self, method: str, what: str) -> InputError:
        return InputError(f"{self.name}: {method} {what}")


def refuse_inconsistent(model: Checked) -> None:
    """Refuse a model whose answers differ between reading three tokens at once and one after another.

    The rows of the state are exchanged in between. The usual reasons are dropout, a state whose tensors have no row per
    sequence, or a mask that is not causal.
    """
    layout = model.layout
    bos, first, last = layout.bos, layout.first_word, layout.last_word
    whole = torch.tensor([[bos, first, last], [bos, last, first]], device=model.device)
    _, expected = model.start(whole)
    _, again = model.start(whole)
    if not _near(again, expected):
        raise InputError(
            f"{model.name}: the output differs between two calls with the same input; switch off dropout with "
            "model.eval()"
        )
    state, _ = model.start(whole[:1, :1])
    state, _ = model.step(tuple(part[[0, 0]] for part in state), whole[:, 1])
    _, stepped = model.step(tuple(part[[1, 0]] for part in state), whole[[1, 0], 2])
    if not _near(stepped, expected[[1, 0]]):
        raise InputError(
            f"{model.name}: step and start give different outputs for the same tokens; every tensor of a state "
            "needs a row per sequence, and no token may depend on later tokens"
        )


def audit(
    model: LanguageModel,
    canaries: Sequence[Canary],
    layout: Layout,
    hparams: evaluate.EvaluationHParams,
    seed: int = 0,
    name: str = "model",
    device: torch.device = CPU,
    test: Users | None = None,
    run: str | None = None,
    round: int = 0,
) -> list[Row]:
    """Measure any model like `flsim.evaluation.evaluate.evaluate` measures a flsim model.

    Without test users there are no rows of utility. Errors have the `name`, and so have rows unless `run` is given.

    Raises:
        InputError: a parameter is not finite, the model breaks the protocol, or a canary is not longer than the prefix.
    """
    checked = Checked(model, layout, name, device)
    evaluate.refuse_short(canaries, hparams)
    if isinstance(model, nn.Module):
        try:
            evaluate.refuse_non_finite(model.module if isinstance(model, ForwardModel) else model)
        except Diverged as error:
            raise InputError(f"{name}: {error}; measure a checkpoint from before training diverged") from error
    refuse_inconsistent(checked)
    of_canaries = evaluate.measure_canaries(checked, canaries, layout, hparams, seed)
    of_model = {}
    if test is None or not len(test):
        evaluate.refuse_own_of_model(hparams.also)
    else:
        of_model = evaluate.measure_model(checked, test, hparams, seed)
    return evaluate.rows_of(
        run or name, round, of_canaries, of_model | {REFERENCES: evaluate.count_references(canaries, hparams)}
    )


def _near(one: Tensor, other: Tensor) -> bool:
    slack = max(SLACK, 8 * torch.finfo(other.dtype).eps)
    return torch.allclose(one, other, rtol=slack, atol=slack)


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
