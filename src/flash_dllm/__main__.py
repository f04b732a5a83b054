"""``python -m flash_dllm`` is the command line."""

from flash_dllm.cli import main

main()
