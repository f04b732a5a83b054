"""Products in 8 bits on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash_dllm import LLM, SamplingParams
from flash_dllm.kernels.linear import linear
from flash_dllm.kernels.linear.hopper import scaled_linear
from flash_dllm.kernels.linear.ref import fp8_linear
from flash_dllm.quant import QuantizedWeight

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.mark.parametrize("rows", [1, 7, 128, 1000])
def test_fp8_against_its_definition(rows: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for e4m3")
    weight, x = torch.randn(512, 1024, device="cuda"), torch.randn(rows, 1024, device="cuda").bfloat16()
    x[:, 5] *= 30
    stored = QuantizedWeight.empty("fp8", (512, 1024), "cuda")
    stored.write(0, weight)
    ours = scaled_linear(x, stored.data, stored.scale, None)
    theirs = fp8_linear(x, stored.data, stored.scale, None)
    assert float((ours.float() - theirs.float()).abs().mean()) < 0.01 * float(theirs.float().abs().mean())
    torch.testing.assert_close(linear(x, stored), ours)


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str
)
@pytest.mark.parametrize(
    ("cache", "decoding"), [("none", "threshold"), ("dual", "threshold"), ("flash", "verify")]
)
def test_models(golden_dir: Path, options: dict[str, str], cache: str, decoding: str) -> None:
    """Captured steps give what steps op by op give."""
    params = SamplingParams(max_tokens=24, stop_at_eos=False, stop_token_ids=())
    seen = []
    for eager in (True, False):
        llm = LLM(
            golden_dir / "dream-tiny", dtype="bfloat16", device="cuda", cache=cache, decoding=decoding,
            enforce_eager=eager, **options,
        )  # fmt: skip
        seen.append(
            [o.outputs[0].token_ids for o in llm.generate([[5, 9], [7] * 17], params, use_tqdm=False)]
        )
    assert seen[0] == seen[1] and [len(ids) for ids in seen[0]] == [24, 24]
