"""Muon for the stacked block matrices, AdamW for embedding, head, norms and biases; float32 masters for
both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_dllm.train.model import Shape, StackedTransformer

MATRICES = ("qkv", "out", "gate_up", "down")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and constants of both optimisers."""

    muon: float = 0.015
    adam: float = 2.5e-3
    momentum: float = 0.95
    decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration in bfloat16: the nearest half-orthogonal matrices of a stack [K, rows,
    cols].
    """
    a, b, c = _COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.mT if tall else x


def _pieces(name: str, shape: Shape) -> list[int]:
    """Rows of the matrices that are fused in a stack: each is orthogonalised on its own."""
    if name == "qkv":
        return shape.qkv_rows
    if name == "gate_up":
        return [shape.ffn, shape.ffn]
    return []


class Optimizer:
    """Updates a model from its `.grad`s. Masters and moments are float32; the model keeps its own dtype."""

    def __init__(self, model: StackedTransformer, rates: Rates) -> None:
        self.model, self.rates = model, rates
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(self.masters[name]) for name in MATRICES}
        self.others = [name for name in self.masters if name not in MATRICES]
        self.first = {name: torch.zeros_like(self.masters[name]) for name in self.others}
        self.second = {name: torch.zeros_like(self.masters[name]) for name in self.others}
        self.steps = 0
        self.fresh_at = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with both peak rates scaled by `factor`; clears the gradients."""
        self.steps += 1
        parameters = dict(self.model.named_parameters())
        grads = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
        self._muon(grads, factor * self.rates.muon)
        self._adam(grads, factor * self.rates.adam)
        names = list(parameters)
        torch._foreach_copy_([parameters[n] for n in names], [self.masters[n] for n in names])
        self.model.zero_grad(set_to_none=True)

    def _muon(self, grads: dict[str, Tensor], rate: float) -> None:
        """Nesterov momentum, then one batched orthogonalisation for each pair of matrix sizes."""
        moments = [self.momentum[name] for name in MATRICES]
        fresh = [grads[name] for name in MATRICES]
        torch._foreach_lerp_(moments, fresh, 1 - self.rates.momentum)
        torch._foreach_lerp_(fresh, moments, self.rates.momentum)
        groups: dict[tuple[int, int], list[Tensor]] = {}
        owners: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        pieces = [
            piece
            for name, grad in zip(MATRICES, fresh, strict=True)
            for piece in _split(grad, _pieces(name, self.model.shape))
        ]
        for i, piece in enumerate(pieces):
            tall = piece.shape[1] > piece.shape[2]
            flat = piece.mT if tall else piece
            key = (flat.shape[1], flat.shape[2])
            groups.setdefault(key, []).append(flat)
            owners.setdefault(key, []).append((i, tall))
        updates: list[Tensor] = list(pieces)
        for key, members in groups.items():
            done = torch.split(orthogonalise(torch.cat(members)), [m.shape[0] for m in members])
            for (i, tall), update in zip(owners[key], done, strict=True):
                updates[i] = update.mT if tall else update
        targets = [
            piece
            for name in MATRICES
            for piece in _split(self.masters[name], _pieces(name, self.model.shape))
        ]
        for target, update in zip(targets, updates, strict=True):
            scale = max(1.0, target.shape[1] / target.shape[2]) ** 0.5
            target.mul_(1 - rate * self.rates.decay).add_(update, alpha=-rate * scale)

    def _adam(self, grads: dict[str, Tensor], rate: float) -> None:
        """Adam with bias correction. No decay: these are embeddings, norms and biases."""
        b1, b2 = self.rates.betas
        fresh = [grads[name] for name in self.others]
        first, second = [self.first[n] for n in self.others], [self.second[n] for n in self.others]
        torch._foreach_lerp_(first, fresh, 1 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, fresh, fresh, 1 - b2)
        age = self.steps - self.fresh_at
        scale = torch._foreach_div(second, 1 - b2**age)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, 1e-9)
        torch._foreach_addcdiv_([self.masters[n] for n in self.others], first, scale, -rate / (1 - b1**age))

    def tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, by name (`master.`, `momentum.`, `first.`, `second.`)."""
        kinds = {
            "master": self.masters,
            "momentum": self.momentum,
            "first": self.first,
            "second": self.second,
        }
        return {f"{kind}.{name}": t for kind, group in kinds.items() for name, t in group.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: int, fresh_at: int = 0) -> bool:
        """Restores `tensors()` and the step count; the model's own weights follow the masters.

        A finished run's state has masters only: the moments then start anew, as after step `steps`. Returns
        whether moments were restored. `fresh_at` is the step at which the saved ones had started.
        """
        own = self.tensors()
        weights = {name for name in own if name.startswith("master.")}
        if tensors.keys() not in (own.keys(), weights):
            raise ValueError(f"state does not fit the model: {sorted(own.keys() ^ tensors.keys())[:4]}")
        moments = len(tensors) == len(own)
        for name, tensor in own.items():
            if name in tensors:
                tensor.copy_(tensors[name])
            else:
                tensor.zero_()
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.masters[name])
        self.steps, self.fresh_at = steps, fresh_at if moments else steps
        return moments


def _split(stack: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    return (stack,) if not rows else torch.split(stack, rows, 1)
