"""The ops of a pass. Each folder holds `ref.py` (pure PyTorch, any device, the definition)."""
