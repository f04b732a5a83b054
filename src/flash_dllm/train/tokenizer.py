"""Byte-level BPE of 2,048 tokens, trained on generated samples and saved in the Hugging Face layout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from flash_dllm.train.tasks import mixture

VOCAB_SIZE = 2048
EOS, MASK, BOS, EOT, HEADER_START, HEADER_END = range(6)
SPECIAL = (
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|startoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)

# Every digit is a token of its own, a word takes the space before it, a line break takes the indentation
# after it.
_PIECES = r"\p{N}|\n+ *| ?\p{L}+| ?[^\s\p{L}\p{N}]+| +|\s"
_CHAT_TEMPLATE = (
    "{{ '<|startoftext|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def train_tokenizer(samples: int = 100_000, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the tokenizer on the first `samples` samples of the training mixture. The result is
    deterministic.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Raw text starts with BOS, as every training text does; chats get theirs from the template.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(samples), trainer)
    return tokenizer


def _texts(samples: int) -> Iterator[str]:
    for seed in range(samples):
        sample = mixture(seed)
        yield from (text for _, text in sample.messages)
        yield sample.answer_text
    # Every prompt's headers hold a role and two line breaks, which are in no message.
    for _ in range(samples // 10):
        yield from ("user", "assistant", "system", "\n\n", "Question:", "\n\nQuestion:", "\nAnswer:")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[EOS],
        "mask_token": SPECIAL[MASK],
        "additional_special_tokens": [SPECIAL[EOT], SPECIAL[HEADER_START], SPECIAL[HEADER_END]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json of a folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def bundled_folder() -> Path:
    """The package's folder with the checked-in tokenizer, `weights/tiny-llada`."""
    return Path(__file__).resolve().parent.parent / "weights" / "tiny-llada"
