"""A trainer for small masked diffusion models: task generator, tokenizer, data workers, optimisers,
export.
"""
