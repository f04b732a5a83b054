"""Presets: the paper's settings by task, and the released code through the Python interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_dllm.llm import LLM
from flash_dllm.methods import MethodError
from flash_dllm.methods.flash import FlashCache
from flash_dllm.methods.presets import PRESETS
from flash_dllm.methods.verify import FlashVerify
from flash_dllm.params import SamplingParams

from .goldens.harness import find_traces

PROMPT = list(range(20, 60))


def start(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), max_num_seqs=2, max_model_len=160, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "track", "gamma"),
    [("gsm8k", 64, 0.8), ("math", 64, 0.85), ("humaneval", 64, 0.85), ("mbpp", 48, 0.8)],
)
def test_settings_by_task_are_table_3(golden_dir: Path, name: str, track: int, gamma: float) -> None:
    method = start(golden_dir / "llada-tiny", preset=name).method
    assert isinstance(method.cache, FlashCache) and isinstance(method.verifier, FlashVerify)
    assert (method.cache.track, method.cache.lookahead, method.schedule.width([99], [99])) == (track, 48, 16)
    assert method.defaults["gamma"] == gamma and method.defaults["epsilon"] == 0.9
    assert (method.verifier.search, method.verifier.verify_rows, method.verifier.views) == (8, 32, "paper")


def test_a_request_overrides_a_preset(golden_dir: Path) -> None:
    llm = start(golden_dir / "llada-tiny", preset="gsm8k")
    params = SamplingParams(max_tokens=32)
    plain = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    never = llm.generate([PROMPT], SamplingParams(max_tokens=32, gamma=1.5), use_tqdm=False)[0].outputs[0]
    alone = start(golden_dir / "llada-tiny", cache="flash", decoding="threshold").generate(
        [PROMPT], params, use_tqdm=False
    )
    assert never.token_ids == alone[0].outputs[0].token_ids
    assert plain.nfe != never.nfe or plain.token_ids != never.token_ids


def test_options_override_a_preset(golden_dir: Path) -> None:
    llm = start(golden_dir / "llada-tiny", preset="gsm8k", track=16, views="leak-free")
    assert isinstance(llm.method.cache, FlashCache) and llm.method.cache.track == 16
    assert llm.method.certificate is not None


def test_the_released_code_answers_as_in_its_traces(golden_dir: Path) -> None:
    """Alone, a prompt takes a slot of the traces' size, so the whole answer is that of the trace."""
    traces = [t for t in find_traces(golden_dir) if t.label == "llada-tiny-flash/flash-dllm-a"]
    if not traces:
        pytest.skip("the golden folder has no trace llada-tiny-flash/flash-dllm-a")
    trace = traces[0].read()
    params, result = trace["params"], trace["results"][0]
    llm = LLM(
        str(traces[0].folder), preset="reference", decoding="threshold", max_num_seqs=1,
        max_model_len=len(trace["prompts"][0]["tokens"]) + params["gen_length"],
        window=params["block_length"], track_num=params["track_num"], mask_num=params["mask_num"],
    )  # fmt: skip
    assert llm.engine.positions == trace["max_length"]
    request = SamplingParams(max_tokens=params["gen_length"], epsilon=params["threshold"])
    output = llm.generate([trace["prompts"][0]["tokens"]], request, use_tqdm=False)[0]
    assert output.canvas_ids == result["slot_tokens_to_gen_end"]
    answer = output.outputs[0]
    assert answer.steps == result["n_steps"]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", params["eos_id"])
    tokens = output.canvas_ids[len(trace["prompts"][0]["tokens"]) :]
    assert answer.token_ids == tokens[: tokens.index(params["eos_id"])] and answer.token_ids


def test_wrong_presets_are_named(golden_dir: Path) -> None:
    for name, options, named in (
        ("fast", {}, "unknown preset 'fast'"),
        ("reference", {"cache": "dual"}, "cache='dual'"),
        ("reference", {"decoding": "branch"}, "'branch'"),
        ("reference", {"track": 4}, "option 'track'"),
        ("gsm8k", {"tracks": 4}, "option 'tracks'"),
    ):
        with pytest.raises(MethodError, match=named):
            start(golden_dir / "llada-tiny", preset=name, **options)
    with pytest.raises(MethodError, match="this is a dream model"):
        start(golden_dir / "dream-tiny", preset="reference")


def test_another_method_leaves_the_preset_behind(golden_dir: Path) -> None:
    llm = start(golden_dir / "llada-tiny", preset="reference")
    other = llm.with_method("none", "threshold")
    assert other.method.name == "none+threshold"
    assert (
        len(other.generate([PROMPT], SamplingParams(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids)
        > 0
    )


def test_every_preset_is_listed() -> None:
    assert set(PRESETS) == {"gsm8k", "math", "humaneval", "mbpp", "reference"}
