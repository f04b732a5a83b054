"""Options of replicas, beside those of the server. Light: the command line reads it at start."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ReplicaArgs(BaseModel):
    """How many replicas, and when there are more or fewer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int | None = Field(None, ge=1, description="engines on Ray Serve, one a GPU (extra: ray)")
    max_replicas: int | None = Field(
        None, ge=1, description="add replicas up to so many while they are busy; --replicas is the least"
    )
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="with --max-replicas: requests a replica should have; default: max_num_seqs, else 8",
    )
    ray_address: str | None = Field(None, description="running Ray cluster; default: RAY_ADDRESS, else here")

    @model_validator(mode="after")
    def _fit(self) -> ReplicaArgs:
        if self.replicas is None:
            for name in ("max_replicas", "target_ongoing_requests", "ray_address"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} goes with replicas")
        if self.replicas and self.max_replicas and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")
        if self.target_ongoing_requests is not None and self.max_replicas is None:
            raise ValueError("target_ongoing_requests goes with max_replicas")
        return self
