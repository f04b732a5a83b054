"""Measuring: kernels, steps, throughput, a server under load, methods, ablations, staleness, and their pages."""
