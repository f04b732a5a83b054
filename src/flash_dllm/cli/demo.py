"""``flash-dllm demo``: three prompts that the bundled model was trained for, with the live canvas."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flash_dllm.cli.fields import takes_options
from flash_dllm.params import EngineArgs, SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PROMPTS = (
    "There are 4 rows of 12 chairs. Karl removes 15 old chairs and brings 20 new ones. "
    "How many chairs are there now?",
    "Write a Python function compute(n) that tells if n is larger than 12.",
    "Write a letter from Leo to Clara about a visit to the library.",
)


@app.command()
@takes_options
def demo(
    engine: EngineArgs,
    params: SamplingParams,
    delay: Annotated[float, typer.Option(min=0.0, help="seconds between steps, to watch")] = 0.08,
    plain: Annotated[bool, typer.Option("--plain", help="no live canvas")] = False,
) -> None:
    """Watch the bundled model answer three prompts, token by token, in the order it is sure of them.

    It is a model of 16 million parameters for templates like these: other questions get nonsense.
    """
    from flash_dllm.llm import LLM

    if engine.max_num_seqs is None:
        engine = engine.model_copy(update={"max_num_seqs": 1})
    llm = LLM.from_args(engine)
    typer.echo(f"{engine.model} on {llm.loaded.model.device}, method {llm.method.name}\n")
    for prompt in PROMPTS:
        job = llm.job([{"role": "user", "content": prompt}], params)
        if plain or not sys.stdout.isatty():
            _plain(llm, job, prompt)
        else:
            from rich.console import Console

            from flash_dllm.cli.canvas import show_live

            list(show_live(llm, job, prompt, Console(), delay))


def _plain(llm: object, job: object, prompt: str) -> None:
    from flash_dllm.cli.generate import show

    typer.echo(f"> {prompt}")
    answer = show(llm, job, prompt, plain=True)
    tokens = len(answer.token_ids)
    typer.echo(f"[{tokens} tokens in {answer.nfe} passes, {answer.tpf:.2f} a pass, {answer.seconds:.2f} s]\n")
