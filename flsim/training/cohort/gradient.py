"""A model's gradient over one batch on a CPU, written out, and plain SGD with this gradient.

There is no padding: a batch is a sequence of ever shorter blocks, see `Steps`. The gradient of the cross-entropy
overwrites the logits, of which a block of positions is in memory. What does not depend on another time step is computed
for all steps together. Buffers are reused.
For plain SGD, the matrix products update the weights directly. The layers between embeddings and output differ by
architecture. Shapes: N positions of a batch, D embedding, H units, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flsim.models.language_model import Params, representative
from flsim.training.cohort.kernels import Products, Scratch, aligned, sigmoid_backward, tanh_backward
from flsim.training.cohort.packing import Steps

LOGITS = 2**22  # number of logits in memory at a time: 16 MB in float32, about what the caches of a processor hold
SUMS = 1e-20, 1e30  # range of sums of exponentials that lose no digits
LEAST_OF_TARGET = 1e-20  # below this exponential, the share of a target in such a sum loses digits


@dataclass(frozen=True)
class PackedBatch:
    """The real positions of a batch, by time, then row; rows are records, longest first."""

    inputs: Tensor  # inputs, targets: int64 [N]
    targets: Tensor
    sizes: list[int]  # number of rows at each time, in descending order
    # factors, [N, D] for the inputs of cells and [N, D] for the inputs of the output layer; None without dropout
    dropout_mask: tuple[Tensor, Tensor] | None = None


def packed_batch(inputs: Tensor, targets: Tensor, pad: int) -> tuple[PackedBatch, Tensor]:
    """Return the positions of int64 [B, T] whose target is not `pad`, and the row and time of each, int64 [2, N]."""
    longest_first = (targets != pad).sum(1).argsort(descending=True, stable=True)
    time, row = (targets[longest_first] != pad).T.nonzero().T
    record = longest_first[row]
    sizes: list[int] = time.bincount().tolist()
    return PackedBatch(inputs[record, time], targets[record, time], sizes), torch.stack([record, time])


def packed_batches(steps: Steps) -> Iterator[PackedBatch]:
    """Yield the batch of each step; see `PackedBatch` for the order of its positions."""
    inputs, targets, first = torch.from_numpy(steps.inputs), torch.from_numpy(steps.targets), 0
    for end, sizes in zip(steps.ends.tolist(), steps.sizes(), strict=True):
        yield PackedBatch(inputs[first:end], targets[first:end], sizes)
        first = end


@dataclass(frozen=True)
class Terms:
    """The gradients of the summed loss by weights, as terms per position."""

    # matrices [rows, m] and [rows, n] by the name of the weight [m, n] whose gradient is their product
    products: dict[str, tuple[Tensor, Tensor]]
    # a matrix [rows, n], or one and factors [rows], by the name of the bias [n] whose gradient is the sum of rows, or
    # of rows times factors
    sums: dict[str, Tensor | tuple[Tensor, Tensor]]

    def with_factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the names, matrices and factors of `sums`."""
        for name, of in self.sums.items():
            yield (name, *of) if isinstance(of, tuple) else (name, of, of.new_ones(len(of)))


@dataclass(frozen=True)
class Gradients(Terms):
    """The gradients by the weights of the cells, and by the embeddings that are read, [rows, D]."""

    read: Tensor


Backward = Callable[[Tensor], Gradients]  # of d_outputs [rows, D], which it can overwrite


class PackedModel(ABC):
    """Weights and the gradient of the mean cross-entropy by them, in buffers that are reused.

    `like` has the names, shapes and dtype (float32 or float64) of parameters, on a CPU; `products` are the large ones.
    """

    def __init__(self, like: Params, products: Products | None = None) -> None:
        self.weights = {name: aligned(value.dtype, *value.shape) for name, value in like.items()}
        self._products = products or Products()
        self._buffer = Scratch(representative(like).dtype)

    @property
    def width(self) -> int:
        return self.weights["embedding"].shape[1]

    @abstractmethod
    def _forward(self, read: Tensor, sizes: list[int]) -> tuple[Tensor, Backward]:
        """Run the cells over embeddings [rows, D]; return r [rows, D] and the backward function."""

    def load(self, params: Params) -> None:
        for name, value in self.weights.items():
            value.copy_(params[name])

    @torch.no_grad()
    def descend(self, batch: PackedBatch, rate: float) -> float:
        """Take one step of plain SGD, in place; return the summed cross-entropy (nats) before it."""
        return self._step(batch, self.weights, -rate)

    @torch.no_grad()
    def gradient(self, batch: PackedBatch) -> tuple[float, Params]:
        """Return the summed cross-entropy (nats), and the gradient of its mean, which the next call overwrites."""
        into = self._zeros(self.weights)
        return self._step(batch, into, 1.0), into

    @torch.no_grad()
    def record_gradients(self, batch: PackedBatch, places: Tensor, records: int) -> tuple[Params, Tensor]:
        """Return the gradient of each record's mean loss, by name [records, ...], and its summed loss, nats [records].

        `places`, int64 [2, N], is the record and time of each position. Records without positions have gradients of 0.
        """
        output: list[Terms] = []
        losses, cells = self._back(batch, [slice(None)], output.append)
        (record, _), count, times = places, len(batch.inputs), len(batch.sizes)
        positions = record.bincount(minlength=records).clamp(min=1)

        def by_record(values: Tensor) -> Tensor:
            """Return values [rows, n] as [records, times, n], with zeros after the end of a record."""
            padded = values.new_zeros(records, times, values.shape[1])
            padded[tuple(places)] = values[:count]
            return padded

        gradients: Params = {}
        for terms in (cells, *output):
            for name, (left, right) in terms.products.items():
                gradients[name] = torch.bmm(by_record(left).transpose(1, 2), by_record(right))
            for name, values, factors in terms.with_factors():
                sums = torch.bmm(by_record(values).transpose(1, 2), by_record(factors[:, None]))
                gradients[name] = sums.squeeze(2)
        gradients["embedding"].index_put_((record, batch.inputs), cells.read[:count], accumulate=True)
        for value in gradients.values():
            value.div_(positions.to(value).view(-1, *[1] * (value.dim() - 1)))
        return {name: gradients[name] for name in self.weights}, losses.new_zeros(records).index_add_(0, record, losses)

    def _step(self, batch: PackedBatch, into: Params, factor: float) -> float:
        """Add the mean loss' gradient times a factor to tensors, which can be the weights; return the summed loss."""
        count, output = len(batch.inputs), into
        scale, blocks = factor / max(count, 1), self._blocks(count)
        if into is self.weights and len(blocks) > 1:  # the next block needs these weights as they are
            output = self._zeros(("embedding", "output_bias"))
        losses, cells = self._back(batch, blocks, lambda terms: self._add(terms, scale, output))
        if output is not into:
            for name, change in output.items():
                into[name].add_(change)
        self._add(cells, scale, into)
        into["embedding"].index_add_(0, batch.inputs, cells.read[:count], alpha=scale)
        return float(losses.sum())

    def _add(self, terms: Terms, scale: float, into: Params) -> None:
        for name, (left, right) in terms.products.items():
            self._products.add(left.T, right, scale, into[name])
        for name, values, factors in terms.with_factors():
            into[name].addmv_(values.T, factors, alpha=scale)

    def _zeros(self, names: Iterable[str]) -> Params:
        return {name: self._buffer(f"d {name}", *self.weights[name].shape).zero_() for name in names}

    def _blocks(self, count: int) -> list[slice]:
        """Return blocks of the rows of `count` positions, whose logits are in memory at a time; all but one are equal.

        The blocks do not depend on the processor, because they change the order of sums.
        """
        rows, words = self._products.rows(count), len(self.weights["embedding"])
        blocks = max(1, -(-rows * words // LOGITS))
        size = max(1, self._products.rows(-(-rows // blocks)))
        return [slice(first, first + size) for first in range(0, rows, size)]

    def _back(
        self, batch: PackedBatch, blocks: Iterable[slice], add: Callable[[Terms], None]
    ) -> tuple[Tensor, Gradients]:
        """Return the loss of each position, nats [N], and the gradients of their sum by the weights of the cells.

        `add` is called with the gradients by the output layer, for each block of rows; the next block overwrites them.
        """
        inputs, mask, operand = batch.inputs, batch.dropout_mask, self._products.operand
        count, width = len(inputs), self.width
        embedding = operand("embedding", self.weights["embedding"])
        read = self._rows("read", count, width)
        torch.index_select(self.weights["embedding"], 0, inputs, out=read[:count])
        if mask:
            read[:count].mul_(mask[0])
        outputs, back = self._forward(read, batch.sizes)
        predicted = outputs
        if mask:
            predicted = self._rows("predicted", count, width).copy_(predicted)
            predicted[:count].mul_(mask[1])
        low_predicted = operand("predicted", predicted)
        losses, d_outputs = outputs.new_empty(count), self._rows("d_outputs", count, width)
        for block in blocks:
            losses[block], errors, factors = self._cross_entropy(low_predicted[block], embedding, batch.targets[block])
            low_errors = operand("errors", errors)
            self._products.multiply(low_errors, embedding, d_outputs[block]).mul_(factors[:, None])
            scaled = torch.mul(predicted[block], factors[:, None], out=self._rows("scaled", len(errors), width))
            add(Terms({"embedding": (low_errors, operand("scaled", scaled))}, {"output_bias": (errors, factors)}))
        if mask:
            d_outputs[:count].mul_(mask[1])
        cells = back(d_outputs)
        if mask:
            cells.read[:count].mul_(mask[0])
        return losses, cells

    def _rows(self, name: str, count: int, width: int) -> Tensor:
        """Return memory for `count` positions, with rows of zeros up to the number of rows in products."""
        rows = self._buffer.aligned(name, self._products.rows(count), width)
        rows[count:] = 0
        return rows

    def _cross_entropy(self, outputs: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses [N], and the gradient of their sum by the logits: a matrix [rows, V], and factors [rows] of it.

        The matrix is in the memory of the logits. For a row of logits z, it is exp(z), minus their sum at the target,
        and the factor is 1 / sum. This saves the passes over memory of a softmax, which subtracts the largest logit and
        divides.
        """
        logits, count = self._buffer("logits", len(outputs), len(embedding)), len(targets)
        own, factors = torch.arange(count), logits.new_zeros(len(outputs))

        def exponentials(is_shifted: bool) -> tuple[Tensor, Tensor]:
            """Write exp of the logits, minus each row's largest one on request; return targets' logits, and sums."""
            self._products.multiply(outputs, embedding.T, logits, self.weights["output_bias"])
            real = logits[:count]
            if is_shifted:
                real.sub_(real.amax(1, keepdim=True))
            return real[own, targets], real.exp_().sum(1)

        chosen, sums = exponentials(is_shifted=False)
        if not bool(((sums > SUMS[0]) & (sums < SUMS[1])).all()):
            chosen, sums = exponentials(is_shifted=True)
        of_targets = logits[own, targets]
        logits[own, targets] = of_targets - sums
        logits[count:] = 0
        torch.reciprocal(sums, out=factors[:count])
        # Near a probability of 1, a difference of logarithms has few digits; near 0, only the difference is finite.
        losses = torch.where(of_targets > LEAST_OF_TARGET, (sums / of_targets).log(), sums.log() - chosen)
        return losses, logits, factors


def previous(sizes: list[int]) -> Tensor:
    """Return each position's predecessor in time, int64 [N - sizes[0]]; the first block has none."""
    before, now = torch.tensor((sizes[:-1], sizes[1:]), dtype=torch.int64)
    return torch.arange(sizes[0], sum(sizes)) - torch.repeat_interleave(before, now)


def shifted(values: Tensor, sizes: list[int], out: Tensor) -> Tensor:
    """Write each position's value at the previous time, of values [N, ...], to `out`; 0 at the first time."""
    first, count = sizes[0], sum(sizes)
    out[:first] = 0
    torch.index_select(values, 0, previous(sizes), out=out[first:count])
    return out


# The gradients of LSTM and GRU networks, with torch's names and order of gates.
#  The gradient of a gate is that of the cell's memory, or of its output, times a factor that does not depend on other
# times. Factors are therefore computed for all times together, and the backward pass only multiplies.


class PackedRecurrent(PackedModel):
    """The written-out gradient of `flsim.models.architectures.RecurrentLanguageModel`; `cell` is a layer's class."""

    def __init__(self, like: Params, cell: "type[Cell]", products: Products | None = None) -> None:
        super().__init__(like, products)
        layers = sum(name.startswith("cells.weight_hh_l") for name in like)
        self._cells = [cell(layer, self.weights, self._buffer) for layer in range(layers)]

    def _forward(self, read: Tensor, sizes: list[int]) -> tuple[Tensor, Backward]:
        hidden, count = read, len(read)
        for cell in self._cells:
            hidden = cell.forward(hidden, sizes)
        projection = self.weights.get("projection")
        outputs = hidden if projection is None else torch.mm(hidden, projection, out=self._rows("r", count, self.width))

        def backward(d_outputs: Tensor) -> Gradients:
            products: dict[str, tuple[Tensor, Tensor]] = {}
            sums: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
            d_hidden = d_outputs
            if projection is not None:
                products["projection"] = hidden, d_outputs
                d_hidden = torch.mm(d_outputs, projection.T, out=self._rows("d_hidden", *hidden.shape))
            for cell in reversed(self._cells):
                gradients = cell.backward(d_hidden)
                products |= gradients.products
                sums |= gradients.sums
                d_hidden = gradients.read
            return Gradients(products, sums, d_hidden)

        return outputs, backward


class Cell(ABC):
    """One layer of a recurrent network; `weights` and `scratch` are those of the `PackedModel`."""

    def __init__(self, layer: int, weights: Params, scratch: Scratch) -> None:
        self._layer, self._weights, self._scratch = layer, weights, scratch
        self._units = weights[f"cells.weight_hh_l{layer}"].shape[1]
        self._read, self._sizes = torch.empty(0, 0), list[int]()

    @abstractmethod
    def forward(self, read: Tensor, sizes: list[int]) -> Tensor:
        """Return h [N, H] over inputs [N, m] from an empty state, and keep the values for `backward`."""

    @abstractmethod
    def backward(self, d_hidden: Tensor) -> Gradients:
        """Return gradients from that by h [N, H], which is overwritten; `Gradients.read` is by the inputs [N, m]."""

    def _weight(self, name: str) -> Tensor:
        return self._weights[self._named(name)]

    def _named(self, name: str) -> str:
        return f"cells.{name}_l{self._layer}"

    def _buffer(self, name: str, width: int | None = None) -> Tensor:
        return self._scratch.aligned(f"{name} {self._layer}", len(self._read), self._units if width is None else width)

    def _inputs(self, read: Tensor, sizes: list[int], bias: Tensor) -> Tensor:
        """Keep the inputs, and return their contribution to the gates, [N, gates x H], with a bias."""
        self._read, self._sizes = read, sizes
        weight = self._weight("weight_ih")
        return torch.addmm(bias, read, weight.T, out=self._buffer("gates", len(weight)))

    def _gradients(self, hidden: Tensor, d_inputs: Tensor, d_recurrent: Tensor) -> Gradients:
        """Return gradients from those by the contributions of inputs and of the past to the gates, [N, gates x H]."""
        d_read = self._buffer("d_read", self._read.shape[1])
        before = shifted(hidden, self._sizes, self._buffer("before"))
        return Gradients(
            read=torch.mm(d_inputs, self._weight("weight_ih"), out=d_read),
            products={
                self._named("weight_ih"): (d_inputs, self._read),
                self._named("weight_hh"): (d_recurrent, before),
            },
            sums={self._named("bias_ih"): d_inputs, self._named("bias_hh"): d_recurrent},
        )


class LSTMCell(Cell):
    """A layer of torch.nn.LSTM: c_t = f c_{t-1} + i g;  h_t = o tanh c_t, with gates i, f, g, o of [x_t, h_{t-1}]."""

    def forward(self, read: Tensor, sizes: list[int]) -> Tensor:
        units = self._units
        gates = self._inputs(read, sizes, self._weight("bias_ih") + self._weight("bias_hh"))
        recurrent, memory, bounded, hidden = self._weight("weight_hh").T, *map(self._buffer, ("c", "tanh c", "h"))
        self._gates, self._memory, self._bounded, self._hidden = gates, memory, bounded, hidden
        parts = (gates, gates[:, : 2 * units], *_columns(gates, units), memory, bounded, hidden)
        before: tuple[Tensor, Tensor] | None = None
        for rows, (gate, inner, i, f, g, o, c, tanh_c, h) in _blocks(parts, sizes):
            if before:
                gate.addmm_(before[1][:rows], recurrent)
            inner.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(i, g, out=c)
            if before:
                c.addcmul_(f, before[0][:rows])
            torch.mul(o, torch.tanh(c, out=tanh_c), out=h)
            before = c, h
        return hidden

    def backward(self, d_hidden: Tensor) -> Gradients:
        units, sizes, recurrent = self._units, self._sizes, self._weight("weight_hh")
        i, f, g, o = _columns(self._gates, units)
        through, kept, spare = map(self._buffer, ("through", "kept", "spare"))
        torch.addcmul(o, self._hidden, self._bounded, value=-1, out=through)  # dc = dh o (1 - tanh^2 c)
        sigmoid_backward(self._bounded, o, grad_input=o)  # do = dh tanh c o (1 - o)
        kept.copy_(f)
        sigmoid_backward(shifted(self._memory, sizes, spare), kept, grad_input=f)  # df = dc c_{t-1} f (1 - f)
        spare.copy_(g)
        tanh_backward(i, spare, grad_input=g)  # dg = dc i (1 - g^2)
        sigmoid_backward(spare, i, grad_input=i)  # di = dc g i (1 - i)
        inner = self._gates.view(len(self._gates), 4, units)[:, :3]
        carried = d_hidden.new_zeros(sizes[0], units)
        later: tuple[int, Tensor] | None = None
        parts = (self._gates, inner, o, through, kept, d_hidden)
        for rows, (d_gate, d_ifg, d_o, to_c, keep, d_h) in reversed(_blocks(parts, sizes)):
            if later is not None:
                d_h[: later[0]].addmm_(later[1], recurrent)
            d_c = carried[:rows].addcmul_(d_h, to_c)
            d_ifg.mul_(d_c[:, None])
            d_o.mul_(d_h)
            d_c.mul_(keep)
            later = rows, d_gate
        return self._gradients(self._hidden, self._gates, self._gates)


class GRUCell(Cell):
    """A layer of torch.nn.GRU: n_t = tanh(x_t's part + r h_{t-1}'s part);  h_t = (1 - z) n + z h_{t-1}; gates r, z."""

    def forward(self, read: Tensor, sizes: list[int]) -> Tensor:
        units = self._units
        gates = self._inputs(read, sizes, self._weight("bias_ih"))
        recurrent, bias = self._weight("weight_hh").T, self._weight("bias_hh")
        past, hidden = self._buffer("past", 3 * units), self._buffer("h")
        self._gates, self._past, self._hidden = gates, past, hidden
        both = slice(2 * units)
        parts = (gates[:, both], *_columns(gates, units), past, past[:, both], past[:, 2 * units :], hidden)
        before: Tensor | None = None
        for rows, (opened, r, z, n, pushed, pushed_opened, pushed_n, h) in _blocks(parts, sizes):
            if before is None:
                pushed.copy_(bias)
                before = torch.zeros_like(h)
            else:
                torch.addmm(bias, before[:rows], recurrent, out=pushed)
            opened.add_(pushed_opened).sigmoid_()
            n.addcmul_(r, pushed_n).tanh_()
            torch.lerp(n, before[:rows], z, out=h)
            before = h
        return hidden

    def backward(self, d_hidden: Tensor) -> Gradients:
        units, sizes, recurrent = self._units, self._sizes, self._weight("weight_hh")
        (r, z, n), pushed = _columns(self._gates, units), self._past[:, 2 * units :]
        kept, of_n, spare = map(self._buffer, ("kept", "of n", "spare"))
        kept.copy_(z)
        shifted(self._hidden, sizes, spare).sub_(n)
        sigmoid_backward(spare, kept, grad_input=z)  # dz = dh (h_{t-1} - n) z (1 - z)
        tanh_backward(torch.neg(kept, out=spare).add_(1), n, grad_input=of_n)  # dn = dh (1 - z) (1 - n^2)
        torch.mul(of_n, r, out=n)  # by h_{t-1}'s part of n: dn r
        sigmoid_backward(torch.mul(of_n, pushed, out=spare), r, grad_input=r)  # dr = dn h_{t-1}'s part r (1 - r)
        inner = self._gates.view(len(self._gates), 3, units)
        later: tuple[int, Tensor, Tensor, Tensor] | None = None
        for rows, (d_gate, d_rzn, keep, d_h) in reversed(_blocks((self._gates, inner, kept, d_hidden), sizes)):
            if later is not None:
                going_on, d_later_gate, d_later, kept_later = later
                d_h[:going_on].addmm_(d_later_gate, recurrent).addcmul_(d_later, kept_later)
            d_rzn.mul_(d_h[:, None])
            later = rows, d_gate, d_h, keep
        d_inputs = self._past  # in memory that is no longer needed
        d_inputs[:, : 2 * units].copy_(self._gates[:, : 2 * units])
        torch.mul(of_n, d_hidden, out=pushed)
        return self._gradients(self._hidden, d_inputs, self._gates)


def _columns(gates: Tensor, units: int) -> tuple[Tensor, ...]:
    """Return each gate, [N, H], of [N, gates x H]."""
    return torch.split_with_sizes(gates, [units] * (gates.shape[1] // units), dim=1)


def _blocks(parts: tuple[Tensor, ...], sizes: list[int]) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Return the number of rows and the parts of each time, of matrices [N, ...]."""
    by_time = zip(*(torch.split_with_sizes(part, sizes) for part in parts), strict=True)
    return list(zip(sizes, by_time, strict=True))


# The gradient of the CIFG, with gates f, o, g as in `flsim.models.architectures`.
#  Only the large products may round their operands to bfloat16 (`flsim.training.cohort.kernels`).


@dataclass(frozen=True)
class Tape:
    """The values of the forward pass that the gradient needs, by time; see `Products.rows` for further rows."""

    read: Tensor  # [N, D], embeddings of the inputs, after dropout
    gates: Tensor  # [N, 3H], f, o, g
    memory: Tensor  # [N, H], c
    bounded: Tensor  # [N, H], tanh c
    hidden: Tensor  # [N, H], o tanh c
    outputs: Tensor  # [N, D], r
    sizes: list[int]  # number of rows of each block, in descending order


class PackedCIFG(PackedModel):
    """The written-out gradient of `flsim.models.architectures.CIFGLanguageModel`."""

    def _forward(self, read: Tensor, sizes: list[int]) -> tuple[Tensor, Backward]:
        tape = self._read(read, sizes)

        def backward(d_outputs: Tensor) -> Gradients:
            operand, count = self._products.operand, len(tape.memory)
            input_weight = operand("input_weight", self.weights["input_weight"])
            d_gates = self._through_time(tape, d_outputs)
            low_d_gates = operand("d_gates", d_gates)
            before = shifted(tape.outputs, sizes, self._rows("before", count, self.width))
            return Gradients(
                read=self._products.multiply(low_d_gates, input_weight.T, self._rows("d_read", count, self.width)),
                products={
                    "input_weight": (operand("read", tape.read), low_d_gates),
                    "recurrent_weight": (operand("before", before), low_d_gates),
                    "projection": (operand("hidden", tape.hidden), operand("d_outputs", d_outputs)),
                },
                sums={"gate_bias": d_gates},
            )

        return tape.outputs, backward

    def _read(self, read: Tensor, sizes: list[int]) -> Tape:
        w, count, (units, width) = self.weights, sum(sizes), self.weights["projection"].shape
        input_weight = self._products.operand("input_weight", w["input_weight"])
        gates = self._products.multiply(
            self._products.operand("read", read), input_weight, self._rows("gates", count, 3 * units), w["gate_bias"]
        )
        memory, bounded = (self._buffer.aligned(name, count, units) for name in ("memory", "bounded"))
        hidden, outputs = self._rows("hidden", count, units), self._rows("outputs", count, width)
        sigmoids, g = gates[:count, : 2 * units], gates[:count, 2 * units :]
        parts = (gates[:count], sigmoids, sigmoids[:, :units], sigmoids[:, units:], g, memory, bounded, hidden, outputs)
        blocks = (torch.split_with_sizes(part[:count], sizes) for part in parts)
        recurrent, projection = w["recurrent_weight"], w["projection"]
        before: tuple[Tensor, Tensor] | None = None
        for rows, gate, fo, f, o, g, c, tanh_c, m, r in zip(sizes, *blocks, strict=True):
            if before:
                if len(before[0]) != rows:  # a view takes as long as a small operation
                    before = before[0][:rows], before[1][:rows]
                gate.addmm_(before[1], recurrent)
            fo.sigmoid_()
            g.tanh_()
            torch.lerp(g, before[0] if before else torch.zeros_like(g), f, out=c)  # f c + (1 - f) g
            torch.mm(torch.mul(o, torch.tanh(c, out=tanh_c), out=m), projection, out=r)
            before = c, r
        return Tape(read, gates, memory, bounded, hidden, outputs, sizes)

    def _through_time(self, tape: Tape, d_outputs: Tensor) -> Tensor:
        """Return the gradient by the gates' inputs [rows, 3H], in the gates' memory; `d_outputs` becomes that by r."""
        (count, units), first = tape.memory.shape, tape.sizes[0]
        recurrent, projection = (self.weights[name].T for name in ("recurrent_weight", "projection"))
        gates, hidden, d_outputs = tape.gates[:count].view(count, 3, units), tape.hidden[:count], d_outputs[:count]
        f, o, g = gates.unbind(1)
        names = ("kept", "through", "gained", "lost")
        kept, through, gained, lost = (self._buffer.aligned(name, count, units) for name in names)
        kept.copy_(f)
        torch.addcmul(o, hidden, tape.bounded, value=-1, out=through)  # dc = dm o (1 - tanh^2 c)
        torch.neg(g[:first], out=gained[:first])
        torch.index_select(tape.memory, 0, previous(tape.sizes), out=gained[first:]).sub_(g[first:])
        sigmoid_backward(gained, kept, grad_input=f)  # df = dc (c_{t-1} - g) f (1 - f)
        torch.neg(kept, out=lost).add_(1)
        tanh_backward(lost, g, grad_input=g)  # dg = dc (1 - f) (1 - g^2)
        sigmoid_backward(tape.bounded, o, grad_input=o)  # do = dm tanh c o (1 - o)
        parts = (tape.gates[:count], gates[:, ::2], o, through, kept, d_outputs)
        blocks = (torch.split_with_sizes(part, tape.sizes) for part in parts)
        carried = hidden.new_zeros(first, 1, units)
        later, d_cell, dc = tape.gates[:0], carried[:0], carried[:0, 0]  # after the last time, no row
        for rows, d_gate, d_fg, d_o, to_c, keep, d_r in reversed(list(zip(tape.sizes, *blocks, strict=True))):
            if len(later) == rows:
                d_r.addmm_(later, recurrent)
            else:
                d_r[: len(later)].addmm_(later, recurrent)
                d_cell, dc = carried[:rows], carried[:rows, 0]
            dm = torch.mm(d_r, projection)
            dc.addcmul_(dm, to_c)
            d_fg.mul_(d_cell)
            d_o.mul_(dm)
            dc.mul_(keep)
            later = d_gate
        tape.gates[count:] = 0
        return tape.gates


def packed_model(like: Params, products: Products | None = None) -> PackedModel:
    """Return the written-out gradient of a built-in model; `like` has its names and shapes, on a CPU."""
    recurrent = like.get("cells.weight_hh_l0")
    if recurrent is None:
        return PackedCIFG(like, products)
    has_memory = recurrent.shape[0] == 4 * recurrent.shape[1]  # the gates of an LSTM; a GRU has three
    return PackedRecurrent(like, LSTMCell if has_memory else GRUCell, products)
