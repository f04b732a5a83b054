"""Running the engine against traces of the published implementations."""
