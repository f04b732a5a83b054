"""Running prompts over a method and counting honestly: answer tokens up to the first stop token only."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_dllm.bench.stats import rate
from flash_dllm.llm import LLM
from flash_dllm.outputs import RequestOutput
from flash_dllm.params import SamplingParams
from flash_dllm.progress import bar
from flash_dllm.requests import Job


@dataclass
class Run:
    """Outputs in the order of the jobs, and the wall time of all of them together."""

    outputs: list[RequestOutput]
    seconds: float


def warm_up(llm: LLM) -> None:
    """A short request that pays for the first allocations, so that the first method does not."""
    params = SamplingParams(max_tokens=2)
    next(iter(llm.as_completed([llm.job([1, 2, 3], params)])))


def run_jobs(llm: LLM, jobs: Sequence[Job]) -> Run:
    """Run jobs together with a progress bar."""
    outputs: dict[int, RequestOutput] = {}
    began = time.perf_counter()
    with bar(len(jobs), show=True) as advance:
        for index, output in llm.as_completed(jobs):
            outputs[index] = output
            advance(len(output.outputs[0].token_ids))
    return Run([outputs[i] for i in range(len(jobs))], time.perf_counter() - began)


def totals(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Counters over the answers of some prompts."""
    answers = [answer for output in outputs for answer in output.outputs]
    tokens, nfe = sum(len(a.token_ids) for a in answers), sum(a.nfe for a in answers)
    return {
        "prompts": len(outputs),
        "answer_tokens": tokens,
        "nfe": nfe,
        "tokens_per_forward": round(tokens / nfe, 3) if nfe else 0.0,
        "rows": sum(a.rows for a in answers),
        "failed": sum(a.error is not None for a in answers),
    }


def accuracy(verdicts: Sequence[bool]) -> dict[str, Any]:
    """Rate in percent with its 95 % Wilson interval."""
    return rate(verdicts)


def peak_memory(device: Any) -> int:
    """Most bytes in use so far: of the GPU since its counter was reset, else of the whole process."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def circumstances(llm: LLM) -> dict[str, Any]:
    """What numbers depend on."""
    import torch

    import flash_dllm

    device = llm.loaded.model.device
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    return {
        "model": llm.loaded.name, "device": str(device), "device_name": name,
        "dtype": str(llm.loaded.model.dtype).removeprefix("torch."), "slots": llm.max_num_seqs,
        "versions": {
            "flash_dllm": flash_dllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "counting": "answer tokens up to the first stop token, without it; every forward pass counts",
    }  # fmt: skip


Check = Callable[[RequestOutput], bool | None]
