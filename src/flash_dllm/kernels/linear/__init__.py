"""Rows times a weight matrix, whatever form the matrix is kept in."""

from .op import Matrix, Weight, linear, nbytes, storages
from .ref import E4M3_MAX, from_fp8, quantize_fp8, quantize_int8, to_fp8

__all__ = [
    "E4M3_MAX",
    "Matrix",
    "Weight",
    "from_fp8",
    "linear",
    "nbytes",
    "quantize_fp8",
    "quantize_int8",
    "storages",
    "to_fp8",
]
