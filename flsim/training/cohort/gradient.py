"""The model's gradient over one batch on a CPU, written out, and plain SGD by this gradient.

Five things make it fast. Nothing is padded: a batch is a sequence of ever shorter blocks, see `Steps`. The gradient of
the cross-entropy takes the place of the logits. All that does not depend on another time step is done for all steps at
once. Buffers are used again. For plain SGD the matrix products update the weights themselves. The large products may
round their operands to bfloat16 (`flsim.training.cohort.products`); those of a single time are too small to gain by it,
and all else stays in the dtype of the weights.

Shapes: N positions of a batch, D embedding, H units, V vocabulary; gates f, o, g as in `flsim.models.cifg`.
"""

from collections.abc import Iterator
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
        kept: dropout's factors, [N, D] of what the cell reads and [N, D] of what words are predicted from; None without
            dropout.
    """

    inputs: Tensor
    targets: Tensor
    sizes: list[int]
    kept: tuple[Tensor, Tensor] | None = None


def packed_batches(steps: Steps) -> Iterator[PackedBatch]:
    """Yield the batch of each step."""
    inputs, targets, first = torch.from_numpy(steps.inputs), torch.from_numpy(steps.targets), 0
    for end, sizes in zip(steps.ends.tolist(), steps.sizes(), strict=True):
        yield PackedBatch(inputs[first:end], targets[first:end], sizes)
        first = end


@dataclass(frozen=True)
class Tape:
    """The forward pass' values that the gradient needs, as blocks of one time after another.

    Matrices that go into large products may have more than N rows, see `Products.rows`.

    Attributes:
        read: [N, D], embeddings of the inputs, after dropout.
        gates: [N, 3H], f, o, g.
        memory: [N, H], c.
        bounded: [N, H], tanh c.
        hidden: [N, H], o tanh c.
        outputs: [N, D], r.
        sizes: number of rows of each block, in descending order.
    """

    read: Tensor
    gates: Tensor
    memory: Tensor
    bounded: Tensor
    hidden: Tensor
    outputs: Tensor
    sizes: list[int]

    @property
    def previous(self) -> Tensor:
        """Return each position's predecessor in time, int64 [N - sizes[0]]; the first block has none."""
        before, now = torch.tensor((self.sizes[:-1], self.sizes[1:]), dtype=torch.int64)
        return torch.arange(self.sizes[0], len(self.memory)) - torch.repeat_interleave(before, now)


class PackedModel:
    """Weights and the gradient of the mean cross-entropy by them, in buffers that are used again.

    Args:
        like: parameters of the model, for names, shapes and dtype (float32 or float64); on a CPU.
        products: the large matrix products; None for those in the dtype of the weights.
    """

    def __init__(self, like: Params, products: Products | None = None) -> None:
        self.weights = {name: torch.empty_like(value) for name, value in like.items()}
        self._products = products or Products()
        self._buffer = Scratch(representative(like).dtype)

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

    def _step(self, batch: PackedBatch, into: Params, factor: float) -> float:
        """Add the mean loss' gradient times a factor to tensors, which may be the weights; return the summed loss."""
        inputs, kept, operand = batch.inputs, batch.kept, self._products.operand
        count, (_, width) = len(inputs), self.weights["projection"].shape
        embedding, input_weight = (operand(name, self.weights[name]) for name in ("embedding", "input_weight"))
        tape = self._read(inputs, batch.sizes, kept and kept[0], input_weight)
        predicted = tape.outputs
        if kept:
            predicted = self._rows("predicted", count, width).copy_(predicted)
            predicted[:count].mul_(kept[1])
        low_predicted = operand("predicted", predicted)
        loss, errors = self._cross_entropy(predicted, low_predicted, embedding, batch.targets)
        low_errors = operand("errors", errors)
        d_outputs = self._products.multiply(low_errors, embedding, self._rows("d_outputs", count, width))
        if kept:
            d_outputs[:count].mul_(kept[1])
        d_gates = self._back(tape, d_outputs)
        low_d_gates = operand("d_gates", d_gates)
        d_read = self._products.multiply(low_d_gates, input_weight.T, self._rows("d_read", count, width))[:count]
        if kept:
            d_read.mul_(kept[0])
        products = {
            "embedding": (low_errors, low_predicted),
            "input_weight": (operand("read", tape.read), low_d_gates),
            "recurrent_weight": (operand("before", self._before(tape, batch.sizes[0])), low_d_gates),
            "projection": (operand("hidden", tape.hidden), operand("d_outputs", d_outputs)),
        }
        scale = factor / max(count, 1)
        for name, (left, right) in products.items():
            self._products.add(left.T, right, scale, into[name])
        for name, terms in (("gate_bias", d_gates), ("output_bias", errors)):
            into[name].add_(terms.sum(0), alpha=scale)
        into["embedding"].index_add_(0, inputs, d_read, alpha=scale)
        return loss

    def _read(self, inputs: Tensor, sizes: list[int], kept: Tensor | None, input_weight: Tensor) -> Tape:
        w, count, (units, width) = self.weights, len(inputs), self.weights["projection"].shape
        read = self._rows("read", count, width)
        torch.index_select(w["embedding"], 0, inputs, out=read[:count])
        if kept is not None:
            read[:count].mul_(kept)
        gates = self._products.multiply(
            self._products.operand("read", read), input_weight, self._rows("gates", count, 3 * units), w["gate_bias"]
        )
        memory, bounded = (self._buffer(name, count, units) for name in ("memory", "bounded"))
        hidden, outputs = self._rows("hidden", count, units), self._rows("outputs", count, width)
        sigmoids, g = gates[:count, : 2 * units], gates[:count, 2 * units :]
        parts = (gates[:count], sigmoids, sigmoids[:, :units], sigmoids[:, units:], g, memory, bounded, hidden, outputs)
        blocks = (torch.split_with_sizes(part[:count], sizes) for part in parts)
        before: tuple[Tensor, Tensor] | None = None
        for gate, fo, f, o, g, c, tanh_c, m, r in zip(*blocks, strict=True):
            if before:
                gate.addmm_(before[1][: len(gate)], w["recurrent_weight"])
            fo.sigmoid_()
            g.tanh_()
            torch.lerp(g, before[0][: len(g)] if before else torch.zeros_like(g), f, out=c)  # f c + (1 - f) g
            torch.mm(torch.mul(o, torch.tanh(c, out=tanh_c), out=m), w["projection"], out=r)
            before = c, r
        return Tape(read, gates, memory, bounded, hidden, outputs, sizes)

    def _before(self, tape: Tape, first: int) -> Tensor:
        """Return the output of the time before at each position, [rows, D]; 0 at the first time."""
        count = len(tape.memory)
        before = self._rows("before", count, tape.outputs.shape[1])
        before[:first] = 0
        torch.index_select(tape.outputs, 0, tape.previous, out=before[first:count])
        return before

    def _rows(self, name: str, count: int, width: int) -> Tensor:
        """Return memory for `count` positions, and rows of zeros up to the number that the products take."""
        rows = self._buffer(name, self._products.rows(count), width)
        rows[count:] = 0
        return rows

    def _cross_entropy(
        self, outputs: Tensor, low_outputs: Tensor, low_embedding: Tensor, targets: Tensor
    ) -> tuple[float, Tensor]:
        """Return the summed loss, and its gradient by the logits [rows, V], in the memory of the logits."""
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
        return float(losses.sum()), logits

    def _back(self, tape: Tape, d_outputs: Tensor) -> Tensor:
        """Return the gradient by the gates' inputs [rows, 3H], in the gates' memory; `d_outputs` becomes that by r.

        A gate's gradient is that of c, or of o tanh c, times a factor that no other time changes: factors come first.
        """
        (count, units), first = tape.memory.shape, tape.sizes[0]
        recurrent, projection = (self.weights[name].T for name in ("recurrent_weight", "projection"))
        gates, hidden, d_outputs = tape.gates[:count].view(count, 3, units), tape.hidden[:count], d_outputs[:count]
        f, o, g = gates.unbind(1)
        kept, through, gained, lost = (self._buffer(n, count, units) for n in ("kept", "through", "gained", "lost"))
        kept.copy_(f)
        torch.addcmul(o, hidden, tape.bounded, value=-1, out=through)  # dc = dm o (1 - tanh^2 c)
        torch.neg(g[:first], out=gained[:first])
        torch.index_select(tape.memory, 0, tape.previous, out=gained[first:]).sub_(g[first:])
        torch.ops.aten.sigmoid_backward(gained, kept, grad_input=f)  # df = dc (c_{t-1} - g) f (1 - f)
        torch.neg(kept, out=lost).add_(1)
        torch.ops.aten.tanh_backward(lost, g, grad_input=g)  # dg = dc (1 - f) (1 - g^2)
        torch.ops.aten.sigmoid_backward(tape.bounded, o, grad_input=o)  # do = dm tanh c o (1 - o)
        parts = (tape.gates[:count], gates[:, ::2], o, through, kept, d_outputs)
        blocks = (torch.split_with_sizes(part, tape.sizes) for part in parts)
        carried, later = hidden.new_zeros(first, units), None
        for d_gate, d_fg, d_o, to_c, keep, d_r in reversed(list(zip(*blocks, strict=True))):
            if later is not None:
                d_r[: len(later)].addmm_(later, recurrent)
            dm = torch.mm(d_r, projection)
            dc = carried[: len(dm)].addcmul_(dm, to_c)
            d_fg.mul_(dc[:, None])
            d_o.mul_(dm)
            dc.mul_(keep)
            later = d_gate
        tape.gates[count:] = 0
        return tape.gates
