"""How many slots fit beside the weights: numbers for LLaDA-8B on a card of 140 GiB, and what the messages say."""

from __future__ import annotations

import pytest
import torch

from flash_dllm.core.state import Canvas
from flash_dllm.core.step import Vocabulary
from flash_dllm.engine.engine import Engine
from flash_dllm.engine.request import Request
from flash_dllm.memory import GIB, MOST_SLOTS, Need, Room, choose_slots
from flash_dllm.methods import build_method
from flash_dllm.models import ModelError
from flash_dllm.models.config import SHAPES
from flash_dllm.models.inspection import row_bytes
from flash_dllm.models.layers import random_model

LLADA_8B = SHAPES["llada-8b"]


def need(places: int = 1512 + 96, kv: torch.dtype = torch.bfloat16) -> Need:
    return Need.of(LLADA_8B, torch.bfloat16, kv, places)


def room(left: float) -> Room:
    """A card with 16 GiB of weights on it, of which ``left`` GiB may still be taken."""
    return Room(total=int(140 * GIB), free=int(124 * GIB), share=(16 + left) / 140)


def test_keys_and_values_of_a_position_take_half_a_mebibyte() -> None:
    assert 512 * 1024 <= need().position < 512 * 1024 + 100
    assert need(kv=torch.float8_e4m3fn).position < 0.51 * need().position
    assert 1.5 * GIB < need().once < 3 * GIB


def test_as_many_slots_as_fit_up_to_a_limit() -> None:
    assert choose_slots(None, need(), None, 4, 1512) == 4
    assert choose_slots(7, need(), None, 4, 1512) == 7
    assert choose_slots(None, need(), room(110), 4, 1512) == MOST_SLOTS
    few = choose_slots(None, need(), room(10), 4, 1512)
    assert 1 <= few < MOST_SLOTS
    taken = need().once + few * need().position * need().positions
    assert taken <= 10 * GIB < taken + need().position * need().positions
    assert choose_slots(100, need(), room(110), 4, 1512) == 100


def test_too_many_slots_say_what_would_fit() -> None:
    with pytest.raises(ModelError) as caught:
        choose_slots(64, need(4096 + 96), room(60), 4, 4096)
    text = str(caught.value)
    assert "max_num_seqs=64" in text and "max_model_len=4096" in text and "60.0 GiB are left" in text
    fits = need(4096 + 96).fits(room(60))
    assert f"{fits} slots fit" in text
    shorter = int(text.rsplit("max_model_len=", 1)[1])
    assert choose_slots(64, need(shorter + 96), room(60), 4, shorter) == 64
    with pytest.raises(ModelError):
        choose_slots(64, need(shorter + 64 + 96), room(60), 4, shorter + 64)


def test_no_room_at_all() -> None:
    with pytest.raises(ModelError, match="no slot fits"):
        choose_slots(None, need(), room(1), 4, 1512)
    assert Room(total=100, free=10, share=0.5).left == 0


def test_the_cpu_has_no_plan() -> None:
    assert Room.of(torch.device("cpu"), 0.9) is None


KEEPERS: list[tuple[str, str, dict[str, str]]] = [
    ("dllm-cache", "threshold", {}),
    ("dynamic", "threshold", {"compare": "input"}),
    ("elastic", "threshold", {}),
]


@pytest.mark.parametrize(("cache", "decoding", "options"), KEEPERS)
def test_what_a_method_keeps_is_planned(cache: str, decoding: str, options: dict[str, str]) -> None:
    config = SHAPES["llada-tiny"]
    method = build_method(cache, decoding, family="llada", **options)
    engine = Engine(
        random_model(config), method, Vocabulary(config.vocab_size, config.mask_id), slots=2, positions=40
    )
    engine.add(Request("a", Canvas([5] * 8 + [config.mask_id] * 4, [False] * 8 + [True] * 4)))
    while not engine.idle:
        engine.step()
    kept = method.bytes_per_position(config, 4) - row_bytes(config, 4)
    assert method.cache.store.nbytes == kept * 2 * 41


def test_a_method_that_keeps_more_has_fewer_slots() -> None:
    """At the defaults: dLLM-Cache on a card of 140 GiB, and distributions of 126,464 numbers a position."""
    fits = {}
    for cache, decoding in (("none", "threshold"), ("dllm-cache", "threshold"), ("none", "adaptive")):
        kept = build_method(cache, decoding, family="llada").bytes_per_position(LLADA_8B, 2)
        wanted = Need.of(LLADA_8B, torch.bfloat16, torch.bfloat16, 4096 + 96, kept)
        fits[cache, decoding] = choose_slots(None, wanted, room(110), 4, 4096)
    assert fits["none", "threshold"] == MOST_SLOTS
    assert 20 < fits["dllm-cache", "threshold"] < 26 and 4 < fits["none", "adaptive"] < 9
