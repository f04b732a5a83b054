"""lm-evaluation-harness's own command line with our model in it.

    python -m flash_dllm.eval.lm_eval run --model flash-dllm --tasks gsm8k \\
        --model_args model=GSAI-ML/LLaDA-8B-Instruct,method=flash+verify

Everything behind the module name is the harness's. humaneval and mbpp run in our sandbox, and need the harness's
``--confirm_run_unsafe_code`` as always.
"""

from __future__ import annotations

import sys

from flash_dllm.errors import FlashDLLMError
from flash_dllm.eval.errors import need


def main() -> int:
    """Register the model, then hand over."""
    try:
        need("lm_eval", "the harness")
        from lm_eval.__main__ import cli_evaluate

        import flash_dllm.eval.lm  # noqa: F401
        from flash_dllm.eval.metric import sandboxed_code_eval

        with sandboxed_code_eval():
            cli_evaluate()
    except FlashDLLMError as error:
        print(f"flash-dllm: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
