"""DP-SGD over records: Poisson-sampled lots, clipped gradients of records, and Gaussian noise once per step.

Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm 1, with opacus' optimizer for clip, sum, noise
and scale (Yousefpour et al., 2021); any torch optimizer can follow, such as RMSProp in Carlini et al. (2019), section
8.3. The mechanism bounds the addition or removal of one record: a phrase that occurs k times is k records.
"""

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from flsim.base.rng import stream
from flsim.models.language_model import TrainableModel
from flsim.training.cohort.gradient import packed_batch, packed_model


def record_gradients(
    model: TrainableModel, inputs: Tensor, targets: Tensor, pad: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Return each record's gradient by name, [B, ...] over the parameter's own shape, and summed loss in nats [B].

    `inputs` are int64 [B >= 1, T]; `targets` have `pad` after the end of a record and in its prompt. A record's loss is
    the mean over its real positions, 0 if it has none. Gradients are computed together with the written-out gradient on
    a CPU, or with vmap, if the model declares them; otherwise one after another.
    """

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(model, parameters, (inputs[None],))[0]
        total = cross_entropy(logits, targets, ignore_index=pad, reduction="sum")
        return total / (targets != pad).sum().clamp(min=1), total

    parameters = {name: value.detach() for name, value in model.trainable.items()}
    has_prompts = bool(((inputs != pad) & (targets == pad)).any())
    if model.capabilities.written_out and inputs.device.type == "cpu" and not has_prompts:
        written_out = packed_model(parameters)
        written_out.weights.update(parameters)
        return written_out.record_gradients(*packed_batch(inputs, targets, pad), len(inputs))
    of_record = grad(loss, has_aux=True)
    if model.capabilities.vectorized:
        gradients, losses = vmap(of_record, in_dims=(None, 0, 0))(parameters, inputs, targets)
        return gradients, losses
    results = [of_record(parameters, *record) for record in zip(inputs, targets, strict=True)]
    stacked = {name: torch.stack([gradients[name] for gradients, _ in results]) for name in parameters}
    return stacked, torch.stack([total for _, total in results])


def private_step(
    model: TrainableModel,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip: float,
    noise_multiplier: float,
    expected: int,
    seed: int,
    step: int,
    physical_batch: int = 8,
    pad: int = 0,
) -> tuple[float, int]:
    """Take one step, in place, along (sum of clipped gradients + noise) / expected; for an empty lot, only noise.

    `inputs` and `targets`, int64 [n, T], are the lot, and `expected` is L, its expected size. `clip` is C; the noise on
    the sum has the standard deviation z C for the `noise_multiplier` z, and is a function of seed and step.
    `physical_batch` records have gradients in memory at a time. Return the summed loss (nats) before the step, and its
    number of positions, which have no noise, and must not be released.
    """
    from opacus.optimizers import DPOptimizer  # takes a second

    def add_noise() -> None:
        """Set p.grad to the summed clipped gradients + N(0, (z C)^2), equal on every device and in a resumed run."""
        for index, parameter in enumerate(private.params):
            parameter.grad = parameter.summed_grad
            if noise_multiplier:
                rng = stream(seed, "record noise", step, index)
                noise = rng.normal(0.0, noise_multiplier * clip, parameter.shape)
                parameter.grad = parameter.grad + torch.from_numpy(noise).to(parameter)

    scales = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip, "expected_batch_size": expected}
    private = DPOptimizer(optimizer, **scales)
    private.add_noise = add_noise
    lengths = (targets != pad).sum(1)
    order = lengths.argsort(stable=True)  # records of similar length are grouped, which reduces padding
    batches = torch.split(order, physical_batch)
    total = 0.0
    for index, rows in enumerate(batches):
        longest = int(lengths[rows].max()) if len(rows) else 0
        if longest:
            gradients, losses = record_gradients(model, inputs[rows, :longest], targets[rows, :longest], pad)
            total += float(losses.sum())
        else:
            gradients = {name: value.new_zeros(0, *value.shape) for name, value in model.trainable.items()}
        for name, parameter in model.trainable.items():
            parameter.grad_sample = gradients[name]  # type: ignore[attr-defined]
        del gradients
        private.signal_skip_step(index + 1 < len(batches))
        private.step()
        private.zero_grad(set_to_none=True)
    return total, int(lengths.sum())
