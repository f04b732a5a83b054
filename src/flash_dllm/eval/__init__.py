"""Evaluation: lm-evaluation-harness over the engine, sandboxed scoring of code, the paper's tables."""
