"""Flash-dLLM: an inference engine for unmodified masked diffusion language models."""

__version__ = "0.1.0"
