"""The gradient of the CIFG, written out; see `flsim.training.cohort.gradient`.

The large products may round their operands to bfloat16 (`flsim.training.cohort.products`); those of a single time are
too small to gain by it, and all else stays in the dtype of the weights.

Shapes: N positions of a batch, D embedding, H units; gates f, o, g as in `flsim.models.cifg`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flsim.training.cohort.gradient import Backward, Gradients, PackedModel, previous, shifted


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
