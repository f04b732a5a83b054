"""Weights in 8 bits, applied at load: ``quantization="int8"`` or ``"fp8"``.

The four matrices of each layer (q, k and v; output; gate and up; down) are stored in 8 bits with a float32 scale
a row. Embedding and LM head stay: the one is looked up, not multiplied, and the other decides which token comes
first. Norms and biases stay too. A full-precision matrix exists for one tensor of the checkpoint at a time.
"""

from .weights import KINDS, QuantizedWeight, allocator, check_device, check_model, quantized

__all__ = ["KINDS", "QuantizedWeight", "allocator", "check_device", "check_model", "quantized"]
