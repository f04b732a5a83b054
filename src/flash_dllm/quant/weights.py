"""A matrix in 8 bits with a scale a row, and models made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_dllm.errors import FlashDLLMError
from flash_dllm.kernels.choice import TRITON, choose
from flash_dllm.kernels.linear import Matrix, quantize_fp8, quantize_int8
from flash_dllm.kernels.linear.hopper import scaled_linear
from flash_dllm.kernels.linear.op import FEW
from flash_dllm.kernels.linear.ref import fp8_linear, int8_linear
from flash_dllm.models.config import ModelError
from flash_dllm.models.layers import MATRICES, Model

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FP8_CAPABILITY = (8, 9)
"""CUDA compute capability from which tensor cores multiply e4m3 (Ada; Hopper is 9.0)."""
FP8_MULTIPLE = 16
"""What both sides of a matrix must be multiples of."""


class QuantizationError(FlashDLLMError):
    """A kind of quantisation that this device or dtype cannot run."""


@dataclass(eq=False)
class QuantizedWeight:
    """A matrix [out, in] as ``data`` [out, in] (int8 or float8_e4m3fn) times ``scale`` [out] float32."""

    data: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, kind: str, shape: tuple[int, int], device: torch.device | str) -> QuantizedWeight:
        """Allocated, not filled."""
        data = torch.empty(shape, dtype=KINDS[kind], device=device)
        return cls(data, torch.empty(shape[0], dtype=torch.float32, device=device))

    @property
    def kind(self) -> str:
        """``int8`` or ``fp8``."""
        return "int8" if self.data.dtype == torch.int8 else "fp8"

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [..., in] times the matrix, [..., out], dtype of ``x``."""
        rows = x.flatten(0, -2)
        product: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
        if self.kind == "fp8":
            product = scaled_linear if x.is_cuda else fp8_linear
        elif choose(None, rows) == TRITON and len(rows) <= FEW:
            from flash_dllm.kernels.linear import triton8

            product = triton8.int8_linear
        else:
            product = int8_linear
        out: Tensor = product(rows, self.data, self.scale, bias).unflatten(0, x.shape[:-1])
        return out

    def write(self, start: int, rows: Tensor, name: str = "a matrix") -> None:
        """Quantise ``rows`` [n, in] into rows ``start``, ``start + 1``, ...

        Raises:
            ModelError: they hold NaN or infinity, which int8 cannot hold and e4m3 would spread over the row.
        """
        if not bool(rows.isfinite().all()):
            raise ModelError(f"{name}: holds NaN or infinity, which cannot be stored in {self.kind}")
        quantize = quantize_int8 if self.kind == "int8" else quantize_fp8
        part = slice(start, start + rows.shape[0])
        data, scale = quantize(rows.to(self.device))
        self.data[part], self.scale[part] = data, scale

    def dequantize(self) -> Tensor:
        """The matrix that it stands for, [out, in] float32."""
        return self.data.float() * self.scale[:, None]

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedWeight:
        """A copy elsewhere. ``dtype`` is that of the activations and changes nothing here."""
        return QuantizedWeight(self.data.to(device), self.scale.to(device))

    def numel(self) -> int:
        return self.data.numel()

    def storages(self) -> Iterator[Tensor]:
        yield self.data
        yield self.scale

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        return QuantizedWeight(self.data[rows], self.scale[rows])


def allocator(kind: str, device: torch.device | str) -> Callable[[int, int], Matrix]:
    """What ``empty_model`` makes its matrices with."""
    return lambda rows, columns: QuantizedWeight.empty(kind, (rows, columns), device)


def quantized(model: Model, kind: str) -> Model:
    """``model`` with its layers' matrices in 8 bits; everything else is shared with it."""
    layers = []
    for layer in model.layers:
        made: dict[str, Any] = {}
        for name in MATRICES:
            matrix = getattr(layer, name)
            made[name] = QuantizedWeight.empty(kind, tuple(matrix.shape), matrix.device)
            made[name].write(0, matrix, name)
        layers.append(replace(layer, **made))
    return replace(model, layers=layers)


def check_device(kind: str, device: torch.device | str) -> None:
    """Refuse a device that cannot run it, before a weight is read.

    Raises:
        QuantizationError: names the kind, the device and what to use instead.
    """
    device = torch.device(device)
    if kind == "int8" or device.type == "cpu":
        return
    if device.type != "cuda":
        raise QuantizationError(f"quantization='fp8': device {device.type!r} has no float8; use int8")
    have = torch.cuda.get_device_capability(device)
    if have < FP8_CAPABILITY:
        raise QuantizationError(
            f"quantization='fp8': needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or later "
            f"(Ada, Hopper), {torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}; use int8"
        )


def check_model(kind: str, model: Model) -> None:
    """Refuse a model whose dtype or part of a matrix the products do not take.

    Raises:
        QuantizationError: names the dtype or the size.
    """
    if kind == "int8" or model.device.type == "cpu":
        return
    if model.dtype != torch.bfloat16:
        name = str(model.dtype).removeprefix("torch.")
        raise QuantizationError(f"quantization='fp8': gives bfloat16 on a GPU, not dtype={name!r}")
    for name in MATRICES:
        for size in getattr(model.layers[0], name).shape:
            if size % FP8_MULTIPLE:
                raise QuantizationError(
                    f"quantization='fp8': {name} has a side of {size}, no multiple of {FP8_MULTIPLE}; use int8"
                )
