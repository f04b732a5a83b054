"""The task generator: stable output, disjoint splits, checkers that tell right from wrong."""

from __future__ import annotations

import hashlib
import re

import pytest

from flash_dllm.train import tasks
from flash_dllm.train.tasks import FAMILIES, check, make, mixture, words
from flash_dllm.train.tasks.code import check_code
from flash_dllm.train.tasks.grammar import Draw, habitual
from flash_dllm.train.tasks.gsm import wrong_marks
from flash_dllm.train.tasks.gsm_kind import KINDS

STABLE = "2c1d671b9863439eab554d9f170aba8e7e08a19884ec275519ad84cb6173dff0"


def digest(samples: list[tasks.Sample]) -> str:
    lines = [f"{s.family}\n{s.prompt_text}\n{s.answer_text}\n{s.gaps}\n{s.free_choices}" for s in samples]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_output_for_given_seeds_is_stable() -> None:
    samples = [mixture(seed) for seed in range(500)]
    samples += [make(f, seed, split) for f in FAMILIES for seed in range(5) for split in ("test", "heldout")]
    assert digest(samples) == STABLE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["train", "test", "heldout"])
def test_reference_answers_pass_their_check(family: str, split: tasks.Split) -> None:
    for seed in range(200):
        sample = make(family, seed, split)
        assert check(sample, sample.answer_text), (sample.prompt_text, sample.answer_text)


@pytest.mark.parametrize("family", FAMILIES)
def test_corrupted_answers_fail(family: str) -> None:
    for seed in range(100):
        sample = make(family, seed, "test")
        assert not check(sample, "")
        assert not check(sample, "I do not know.")
        # A short dialogue answer may have said what it must before its half.
        if family not in ("chat", "fact"):
            assert not check(sample, sample.answer_text[: len(sample.answer_text) // 2])


@pytest.mark.parametrize("family", ["gsm", "arith", "list", "json", "story", "letter"])
def test_answers_of_other_questions_mostly_fail(family: str) -> None:
    pairs = [(make(family, seed, "test"), make(family, seed + 1, "test")) for seed in range(100)]
    assert sum(check(sample, other.answer_text) for sample, other in pairs) <= 5


def test_a_wrong_digit_fails() -> None:
    for seed in range(100):
        sample = make("gsm", seed, "test")
        answer = sample.check["answer"]
        assert not check(sample, sample.answer_text.replace(f"#### {answer}", f"#### {answer + 1}"))


def test_calculator_marks_are_right_and_counted_when_wrong() -> None:
    for seed in range(300):
        assert wrong_marks(make("gsm", seed, "train").answer_text) == 0
    assert wrong_marks("<<2*3=6>>6 <<7-2=4>>4 <<9/3=2>>2") == 2


def test_no_question_is_in_two_splits() -> None:
    questions = {
        split: {_question(make(f, seed, split, shots=0)) for f in FAMILIES for seed in range(400)}
        for split in ("train", "dev", "test", "heldout")
    }
    names = list(questions)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            # Held-out questions share the test class, but never a template.
            assert not questions[one] & questions[two], (one, two)


def _question(sample: tasks.Sample) -> str:
    return sample.prompt_text if not sample.gaps else sample.answer_text


@pytest.mark.parametrize("split", ["dev", "test", "heldout"])
def test_few_shot_examples_come_from_the_training_split(split: tasks.Split) -> None:
    train_class = 0
    for seed in range(60):
        sample = make("fact", seed, split, shots=2)
        asked = re.findall(r"Question: (.*)\nAnswer:", sample.prompt_text) or [
            text for role, text in sample.messages if role == "user"
        ]
        for example in asked[:-1]:
            train_class += tasks.zlib.crc32(example.encode()) % 16 > 1
        assert len(asked) == 3
    assert train_class == 120


def test_held_out_templates_are_not_drawn_in_training() -> None:
    draws = [Draw(seed, heldout=False).frame(("a", "b"), ("c",)) for seed in range(100)]
    assert set(draws) == {"a", "b"}
    assert {Draw(seed, heldout=True).frame(("a", "b"), ("c",)) for seed in range(20)} == {"c"}
    for kind in KINDS:
        assert not set(kind.train) & set(kind.held), kind.name


def test_there_are_many_kinds_of_word_problems_with_two_to_five_steps() -> None:
    assert len(KINDS) >= 20
    assert {len(kind.lines) for kind in KINDS} >= {2, 3, 4, 5}


def test_names_in_an_answer_are_in_its_prompt() -> None:
    for family in ("gsm", "chat", "json", "story", "letter"):
        for seed in range(200):
            sample = make(family, seed, "heldout" if seed % 2 else "train")
            for name in re.findall(r"[A-Z][a-z]+", sample.answer_text):
                assert name not in words.NAMES or name in sample.prompt_text


def test_word_problems_have_near_ten_free_choices_beside_the_habitual_ones() -> None:
    free = [make("gsm", seed, "train").free_choices for seed in range(300)]
    assert 8.5 < sum(free) / len(free) < 11


def test_a_habitual_place_takes_its_first_option_nearly_always_and_is_not_counted() -> None:
    places = [(f"a{i}", f"b{i}") for i in range(400)]
    chosen = [place for place in places if habitual(repr(place))]
    assert 0.5 < len(chosen) / len(places) < 0.7
    habits, free = Draw(1, heldout=False), Draw(1, heldout=False, habits=False)
    first = [habits.say(place) == place[0] for place in chosen * 10]
    assert 0.93 < sum(first) / len(first) < 1.0 and habits.free == 0
    first = [free.say(place) == place[0] for place in chosen * 10]
    assert 0.4 < sum(first) / len(first) < 0.6 and free.free == len(first)


def test_an_unending_or_importing_function_fails_quickly() -> None:
    data = {"task": 0, "k": 3, "name": "solve"}
    assert check_code(data, "def solve(x):\n    return x + 3")
    assert not check_code(data, "def solve(x):\n    while True:\n        x += 1")
    assert not check_code(data, "import os\ndef solve(x):\n    return x + 3")
    assert not check_code(data, "def solve(x:\n    return x + 3")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="poem"):
        make("poem", 0, "train")
    with pytest.raises(KeyError):
        make("gsm", 0, "validation")  # type: ignore[arg-type]
