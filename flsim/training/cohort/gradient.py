"""A model's gradient over one batch on a CPU, written out, and plain SGD by this gradient.

Five things make it fast. Nothing is padded: a batch is a sequence of ever shorter blocks, see `Steps`. The gradient of
the cross-entropy takes the place of the logits. All that does not depend on another time step is done for all steps at
once. Buffers are used again. For plain SGD the matrix products update the weights themselves.

What all models share is here: embeddings, the output layer that is tied to them, and the loss. What is between is an
architecture's own: `flsim.training.cohort.packed_models` and `flsim.training.cohort.packed_models`.

Shapes: N positions of a batch, D embedding, H units, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flsim.models.language_model import Params, representative
from flsim.training.cohort.products import Products, Scratch
from flsim.training.cohort.steps import Steps

RARE = 1e-30  # a probability below it has lost digits; its logarithm is computed from the logits


@dataclass(frozen=True)
class PackedBatch:
    """The real positions of a batch, by time, then row; rows are records, longest first.

    Attributes:
        inputs, targets: int64 [N].
        sizes: number of rows at each time, in descending order.
        kept: dropout's factors, [N, D] of what the cells read and [N, D] of what words are predicted from; None without
            dropout.
    """

    inputs: Tensor
    targets: Tensor
    sizes: list[int]
    kept: tuple[Tensor, Tensor] | None = None


def packed_batch(inputs: Tensor, targets: Tensor, pad: int) -> tuple[PackedBatch, Tensor]:
    """Return the real positions of a padded batch, and the coordinates of each.

    Args:
        inputs: int64 [B, T].
        targets: int64 [B, T]; `pad` after the end of a record.
        pad: the id of padding.

    Returns:
        The batch, and int64 [2, N]: the record, as a row of `inputs`, and the time of each position.
    """
    longest_first = (targets != pad).sum(1).argsort(descending=True, stable=True)
    time, row = (targets[longest_first] != pad).T.nonzero().T
    record = longest_first[row]
    sizes: list[int] = time.bincount().tolist()
    return PackedBatch(inputs[record, time], targets[record, time], sizes), torch.stack([record, time])


def packed_batches(steps: Steps) -> Iterator[PackedBatch]:
    """Yield the batch of each step."""
    inputs, targets, first = torch.from_numpy(steps.inputs), torch.from_numpy(steps.targets), 0
    for end, sizes in zip(steps.ends.tolist(), steps.sizes(), strict=True):
        yield PackedBatch(inputs[first:end], targets[first:end], sizes)
        first = end


@dataclass(frozen=True)
class Gradients:
    """The gradients of a batch's summed loss, as terms of its positions.

    Attributes:
        read: [rows, D], by the embeddings that are read.
        products: matrices [rows, m] and [rows, n] by the name of the weight [m, n] whose gradient is their product.
        sums: a matrix [rows, n] by the name of the bias [n] whose gradient is the sum of its rows.
    """

    read: Tensor
    products: dict[str, tuple[Tensor, Tensor]]
    sums: dict[str, Tensor]


Backward = Callable[[Tensor], Gradients]  # of d_outputs [rows, D], which it may overwrite


class PackedModel(ABC):
    """Weights and the gradient of the mean cross-entropy by them, in buffers that are used again.

    Args:
        like: parameters of the model, for names, shapes and dtype (float32 or float64); on a CPU.
        products: the large matrix products; None for those in the dtype of the weights.
    """

    def __init__(self, like: Params, products: Products | None = None) -> None:
        self.weights = {name: torch.empty_like(value) for name, value in like.items()}
        self._products = products or Products()
        self._buffer = Scratch(representative(like).dtype)

    @property
    def width(self) -> int:
        """Return D."""
        return self.weights["embedding"].shape[1]

    @abstractmethod
    def _forward(self, read: Tensor, sizes: list[int]) -> tuple[Tensor, Backward]:
        """Run the cells over embeddings [rows, D]; return r [rows, D] and the way back."""

    def load(self, params: Params) -> None:
        """Copy parameters into the weights."""
        for name, value in self.weights.items():
            value.copy_(params[name])

    @torch.no_grad()
    def descend(self, batch: PackedBatch, rate: float) -> float:
        """Take one step of plain SGD, in place; return the summed cross-entropy (nats) before it."""
        return self._step(batch, self.weights, -rate)

    @torch.no_grad()
    def gradient(self, batch: PackedBatch) -> tuple[float, Params]:
        """Return the summed cross-entropy (nats), and the gradient of its mean, which the next call overwrites."""
        into = {name: self._buffer(f"d {name}", *value.shape).zero_() for name, value in self.weights.items()}
        return self._step(batch, into, 1.0), into

    @torch.no_grad()
    def record_gradients(self, batch: PackedBatch, places: Tensor, records: int) -> tuple[Params, Tensor]:
        """Return the gradient of each record's mean loss, by name [records, ...], and its summed loss, nats [records].

        Args:
            batch: the batch.
            places: int64 [2, N], the record and the time of each position.
            records: number of records; those without positions have gradients of 0.
        """
        losses, cells = self._back(batch)
        (record, _), count, times = places, len(batch.inputs), len(batch.sizes)
        positions = record.bincount(minlength=records).clamp(min=1)

        def by_record(values: Tensor) -> Tensor:
            """Return values [rows, n] as [records, times, n], with zeros after the end of a record."""
            padded = values.new_zeros(records, times, values.shape[1])
            padded[tuple(places)] = values[:count]
            return padded

        gradients = {
            name: torch.bmm(by_record(left).transpose(1, 2), by_record(right))
            for name, (left, right) in cells.products.items()
        }
        gradients |= {name: by_record(terms).sum(1) for name, terms in cells.sums.items()}
        gradients["embedding"].index_put_((record, batch.inputs), cells.read[:count], accumulate=True)
        for value in gradients.values():
            value.div_(positions.to(value).view(-1, *[1] * (value.dim() - 1)))
        return {name: gradients[name] for name in self.weights}, losses.new_zeros(records).index_add_(0, record, losses)

    def _step(self, batch: PackedBatch, into: Params, factor: float) -> float:
        """Add the mean loss' gradient times a factor to tensors, which may be the weights; return the summed loss."""
        losses, cells = self._back(batch)
        scale = factor / max(len(batch.inputs), 1)
        for name, (left, right) in cells.products.items():
            self._products.add(left.T, right, scale, into[name])
        for name, terms in cells.sums.items():
            into[name].add_(terms.sum(0), alpha=scale)
        into["embedding"].index_add_(0, batch.inputs, cells.read[: len(batch.inputs)], alpha=scale)
        return float(losses.sum())

    def _back(self, batch: PackedBatch) -> tuple[Tensor, Gradients]:
        """Return the loss of each position, nats [N], and the gradients of their sum by all weights."""
        inputs, kept, operand = batch.inputs, batch.kept, self._products.operand
        count, width = len(inputs), self.width
        embedding = operand("embedding", self.weights["embedding"])
        read = self._rows("read", count, width)
        torch.index_select(self.weights["embedding"], 0, inputs, out=read[:count])
        if kept:
            read[:count].mul_(kept[0])
        outputs, back = self._forward(read, batch.sizes)
        predicted = outputs
        if kept:
            predicted = self._rows("predicted", count, width).copy_(predicted)
            predicted[:count].mul_(kept[1])
        low_predicted = operand("predicted", predicted)
        losses, errors = self._cross_entropy(predicted, low_predicted, embedding, batch.targets)
        low_errors = operand("errors", errors)
        d_outputs = self._products.multiply(low_errors, embedding, self._rows("d_outputs", count, width))
        if kept:
            d_outputs[:count].mul_(kept[1])
        cells = back(d_outputs)
        if kept:
            cells.read[:count].mul_(kept[0])
        cells.products["embedding"] = low_errors, low_predicted
        cells.sums["output_bias"] = errors
        return losses, cells

    def _rows(self, name: str, count: int, width: int) -> Tensor:
        """Return memory for `count` positions, and rows of zeros up to the number that the products take."""
        rows = self._buffer(name, self._products.rows(count), width)
        rows[count:] = 0
        return rows

    def _cross_entropy(
        self, outputs: Tensor, low_outputs: Tensor, low_embedding: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return losses [N], and the gradient of their sum by the logits [rows, V], in the memory of the logits."""
        bias, embedding = self.weights["output_bias"], self.weights["embedding"]
        logits, count = self._buffer("logits", len(outputs), len(embedding)), len(targets)
        self._products.multiply(low_outputs, low_embedding.T, logits, bias)
        errors = torch.softmax(logits[:count], -1, out=logits[:count])
        logits[count:] = 0
        own = torch.arange(count)
        chosen = errors[own, targets]
        losses, rare = -chosen.log(), chosen < RARE
        if bool(rare.any()):
            again = torch.addmm(bias, outputs[:count][rare], embedding.T)
            losses[rare] = cross_entropy(again, targets[rare], reduction="none")
        errors[own, targets] = chosen - 1
        return losses, logits


def previous(sizes: list[int]) -> Tensor:
    """Return each position's predecessor in time, int64 [N - sizes[0]]; the first block has none."""
    before, now = torch.tensor((sizes[:-1], sizes[1:]), dtype=torch.int64)
    return torch.arange(sizes[0], sum(sizes)) - torch.repeat_interleave(before, now)


def shifted(values: Tensor, sizes: list[int], out: Tensor) -> Tensor:
    """Write each position's value of the time before, of values [N, ...], to `out`; 0 at the first time."""
    first, count = sizes[0], sum(sizes)
    out[:first] = 0
    torch.index_select(values, 0, previous(sizes), out=out[first:count])
    return out
