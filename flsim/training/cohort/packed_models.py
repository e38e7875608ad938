"""The written-out gradients by architecture."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from flsim.models.language_model import Params
from flsim.training.cohort.gradient import Backward, Gradients, PackedModel, previous, shifted
from flsim.training.cohort.products import Products, Scratch

# The gradients of LSTM and GRU networks, written out; see `flsim.training.cohort.gradient`.
#
# Cells are those of torch.nn.LSTM and torch.nn.GRU, whose names and order of gates the weights have. A gate's
# gradient is that of the cell's memory, or of its output, times a factor that no other time changes. So factors are
# computed for all times at once, in the memory of the gates, and the way back through time only multiplies.
#
# Shapes: N positions of a batch, in blocks of one time after another; D embedding, H units.

sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


class PackedRecurrent(PackedModel):
    """The written-out gradient of `flsim.models.architectures.RecurrentLanguageModel`.

    Args:
        like, products: see `PackedModel`.
        cell: the class of the layers.
    """

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
            sums: dict[str, Tensor] = {}
            d_hidden = d_outputs
            if projection is not None:
                products["projection"] = hidden, d_outputs
                d_hidden = torch.mm(d_outputs, projection.T, out=self._rows("d_hidden", *hidden.shape))
            for cell in reversed(self._cells):
                gradients = cell.backward(d_hidden)
                products |= gradients.products
                sums |= gradients.sums
                d_hidden = gradients.read
            return Gradients(d_hidden, products, sums)

        return outputs, backward


class Cell(ABC):
    """One layer of a recurrent network; `weights` and `scratch` are those of its `PackedModel`."""

    def __init__(self, layer: int, weights: Params, scratch: Scratch) -> None:
        self._layer, self._weights, self._scratch = layer, weights, scratch
        self._units = weights[f"cells.weight_hh_l{layer}"].shape[1]
        self._read, self._sizes = torch.empty(0, 0), list[int]()

    @abstractmethod
    def forward(self, read: Tensor, sizes: list[int]) -> Tensor:
        """Return h [N, H] over inputs [N, m] of rows that begin with nothing, and keep what `backward` needs."""

    @abstractmethod
    def backward(self, d_hidden: Tensor) -> Gradients:
        """Return gradients for that by h [N, H], which is overwritten; `Gradients.read` is by the inputs [N, m]."""

    def _weight(self, name: str) -> Tensor:
        return self._weights[self._named(name)]

    def _named(self, name: str) -> str:
        return f"cells.{name}_l{self._layer}"

    def _buffer(self, name: str, width: int | None = None) -> Tensor:
        return self._scratch(f"{name} {self._layer}", len(self._read), self._units if width is None else width)

    def _inputs(self, read: Tensor, sizes: list[int], bias: Tensor) -> Tensor:
        """Keep the inputs, and return their part of the gates, [N, gates x H], with a bias."""
        self._read, self._sizes = read, sizes
        weight = self._weight("weight_ih")
        return torch.addmm(bias, read, weight.T, out=self._buffer("gates", len(weight)))

    def _gradients(self, hidden: Tensor, d_inputs: Tensor, d_recurrent: Tensor) -> Gradients:
        """Return gradients, of those by the gates' parts [N, gates x H] that come of the inputs and of the past."""
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
        d_inputs = self._past  # in memory that is not needed any more
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


# The gradient of the CIFG, written out; see `flsim.training.cohort.gradient`.
#
# The large products may round their operands to bfloat16 (`flsim.training.cohort.products`); those of a single time
# are too small to gain by it, and all else stays in the dtype of the weights.
#
# Shapes: N positions of a batch, D embedding, H units; gates f, o, g as in `flsim.models.cifg`.


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


class PackedCIFG(PackedModel):
    """The written-out gradient of `flsim.models.cifg.CIFGLanguageModel`."""

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

    def _through_time(self, tape: Tape, d_outputs: Tensor) -> Tensor:
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
        torch.index_select(tape.memory, 0, previous(tape.sizes), out=gained[first:]).sub_(g[first:])
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


def packed_model(like: Params, products: Products | None = None) -> PackedModel:
    """Return the written-out gradient of a built-in model that declares one.

    Args:
        like: parameters of the model, whose names and shapes tell its architecture; on a CPU.
        products: see `PackedModel`.
    """
    recurrent = like.get("cells.weight_hh_l0")
    if recurrent is None:
        return PackedCIFG(like, products)
    has_memory = recurrent.shape[0] == 4 * recurrent.shape[1]  # the gates of an LSTM; a GRU has three
    return PackedRecurrent(like, LSTMCell if has_memory else GRUCell, products)
