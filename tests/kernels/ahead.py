"""Compiles a Triton kernel for a GPU that is not there: registers, spills and shared memory without running it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel: bytes of shared memory, registers a thread, bytes spilled, its PTX."""

    shared: int
    registers: int
    spilled: int
    ptx: str


def compile_for(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    arch: int = 90,
    aligned: tuple[str, ...] = (),
    **options: int,
) -> Compiled:
    """Compile ``kernel`` for compute capability ``arch`` (90: H100 and H200; 89: L40S, 4090; 80: A100).

    ``signature`` maps every argument to ``*bf16``, ``i32``, ``fp32``, ... ; those in ``constants`` are constexpr.
    As at a launch, pointers are multiples of 16 bytes; so are the integers named in ``aligned`` (multiples of 16).
    Must run where ``TRITON_INTERPRET`` is not set. Options: num_warps, num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constants else kind for name, kind in signature.items()}
    attrs = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in aligned
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _assembled(built.asm["cubin"])
    return Compiled(built.metadata.shared, registers, spilled, built.asm["ptx"])


def _assembled(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack a thread (spills) of the only kernel in a cubin."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=120
        )
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])
