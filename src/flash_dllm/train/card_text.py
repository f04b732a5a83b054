"""What the bundled models' cards say in words. Results come from committed measurements instead."""

from __future__ import annotations

GOALS = {"all": (94.0, 90.0), "gsm": (88.0, 82.0)}
"""Wanted accuracy in percent, and the least accepted where decoding in parallel is hard."""
PARALLEL = (3.0, 5.0)
"""Tokens a forward on word problems at threshold 0.9 that the tasks are meant to have."""

WHAT = {
    "tiny-llada": "A small masked diffusion language model in the LLaDA layout",
    "tiny-dream": (
        "A small masked diffusion language model in the Dream layout (grouped queries, biases on queries, "
        "keys and values, shifted prediction)"
    ),
    "tiny-guide": (
        "A small causal language model in the Qwen2 layout, the guide of guided decoding, with the "
        "tokenizer of the two bundled diffusion models"
    ),
}

LABELS = {
    "gsm": "word problems",
    "arith": "arithmetic",
    "list": "list operations",
    "convert": "unit conversion",
    "chat": "short dialogue",
    "fact": "closed facts",
    "code": "Python functions",
    "json": "JSON extraction",
    "story": "short stories",
    "letter": "letters",
    "infill": "gaps in texts",
    "all": "all",
}

DATA = (
    "All data are made by `flash_dllm.train.tasks`: eleven families of short tasks from templates, with "
    "answers that a program can check. There is no text from elsewhere in them, by people or by models. A "
    "hash of the question decides its split, so no question is both trained on and asked. Below, *new "
    "questions* are of templates seen in training, and *new templates* were never drawn in training."
)

LIMITS = {
    "tiny-llada": (
        "In short stories it often writes a sentence fewer than was asked for, which counts as wrong: decoded in "
        "blocks, as in the tables above, and hardly ever in a window (`--option schedule=window`).",
        "After a wrong answer to a word problem it may go on with more steps and a second answer.",
        "Digits of a number that are committed in the same pass do not always fit together (222 for 122).",
    ),
    "tiny-dream": (
        "In short dialogue more than a quarter of its answers are wrong; why has not been looked into.",
    ),
    "tiny-guide": ("It is no masked diffusion model and serves only as a guide.",),
}

ALL_LIMITS = (
    "It knows the templates of its task generator and nothing else. It cannot hold a conversation, answer "
    "general questions, write code beyond its few kinds of functions, or read any language but plain "
    "English.",
    "It is made to test and show decoding, not to be used for its answers.",
    "Numbers beyond the generator's ranges are guessed.",
    "Its longest canvas has 1,024 positions. Accuracy after long prompts has not been measured.",
)
