"""Requests, slots and the loop that keeps them busy."""
