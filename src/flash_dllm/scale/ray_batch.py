"""A batch over many engines by Ray Data: one actor an engine, rows sent to it in groups.

The driver reads and checks the rows and writes the answers, so that output and resuming are those of a run without Ray.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from flash_dllm.errors import FlashDLLMError
from flash_dllm.params import EngineArgs, SamplingParams
from flash_dllm.scale.extras import ScaleError, need
from flash_dllm.scale.rows import BadRow, Row

ROWS_A_SLOT = 16
"""Rows of a group for each slot of an engine. Slots drain at the end of a group, the more rarely the larger it is."""
_ERROR = re.compile(r"([a-z_]+\.)*[A-Z]\w*(Error|Exception): ")


@dataclass(frozen=True)
class RayArgs:
    """How many engines, where.

    Attributes:
        actors: engines; None is one a GPU of the cluster, or one if it has none.
        address: of a running cluster, or ``local``, a new one on this machine; None is what ``RAY_ADDRESS`` names, else
            ``local``.
        group: rows that an engine gets at a time; None is ``ROWS_A_SLOT`` for each slot.
        init: further arguments of ``ray.init``.
    """

    actors: int | None = None
    address: str | None = None
    group: int | None = None
    init: dict[str, Any] | None = None


class EngineActor:
    """One engine, in an actor of Ray. Options come as plain data, which any version of Python can send."""

    def __init__(self, engine: dict[str, Any], params: dict[str, Any], raw: bool) -> None:
        from flash_dllm.llm import LLM
        from flash_dllm.scale.answers import Answerer

        self._refused: FlashDLLMError | None = None
        try:
            llm = LLM.from_args(EngineArgs.model_validate(engine))
            self._answerer = Answerer(llm, SamplingParams.model_validate(params), raw)
        except FlashDLLMError as exc:
            # Raised here, Ray would take it for an actor that died, and start it again and again.
            self._refused = exc

    def __call__(self, table: Any) -> Iterator[dict[str, list[str]]]:
        """Answers of a group of rows, each as JSON text, as they are finished."""
        if self._refused is not None:
            raise self._refused
        rows = [Row(**json.loads(text)) for text in table["row"].to_pylist()]
        for outcome in self._answerer.answers(rows):
            yield {"outcome": [pack(outcome)]}


def pack(outcome: dict[str, Any] | BadRow) -> str:
    """An outcome as text; :func:`unpack` is the way back."""
    return json.dumps({"bad": asdict(outcome)} if isinstance(outcome, BadRow) else {"answer": outcome})


def unpack(text: str) -> dict[str, Any] | BadRow:
    """See :func:`pack`."""
    data = json.loads(text)
    return BadRow(**data["bad"]) if "bad" in data else data["answer"]


class RayAnswers:
    """Answers rows by engines of a Ray cluster; see :data:`flash_dllm.scale.batch.Answers`.

    Raises:
        ScaleError: Ray is not installed, or the cluster has not that many GPUs.
    """

    def __init__(self, ray_args: RayArgs, engine: EngineArgs, params: SamplingParams, raw: bool) -> None:
        if engine.tensor_parallel_size > 1:
            raise ScaleError(
                f"tensor_parallel_size={engine.tensor_parallel_size} with --ray: an engine is one process"
            )
        self.ray = need("ray", "--ray", "ray")
        need("ray.data", "--ray", "ray")
        self.args, self.engine, self.params, self.raw = ray_args, engine, params, raw

    def __call__(self, rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
        """Read all rows, then answer them; the rows wait in Ray's object store, which spills to disk.

        Raises:
            ScaleError: an engine cannot be started or fails; what was answered before has been given.
        """
        first = next(rows, None)
        if first is None:
            return
        began = not self.ray.is_initialized()
        if began:
            connect(self.ray, self.args)
        try:
            yield from self._answer(first, rows)
        finally:
            if began:
                self.ray.shutdown()

    def _answer(self, first: Row, rows: Iterator[Row]) -> Iterator[dict[str, Any] | BadRow]:
        gpus = int(self.ray.cluster_resources().get("GPU", 0))
        on_gpu = self.engine.device != "cpu" and gpus > 0
        actors = self.args.actors or (gpus if on_gpu else 1)
        if on_gpu and actors > gpus:
            raise ScaleError(f"{actors} engines need {actors} GPUs; the cluster has {gpus}")
        group = self.args.group or ROWS_A_SLOT * (self.engine.max_num_seqs or (32 if on_gpu else 4))
        data, waiting = self._dataset(first, rows, group)
        resources: dict[str, Any] = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
        answered = data.map_batches(
            EngineActor,
            fn_constructor_args=(
                self.engine.model_dump(),
                self.params.model_dump(exclude_unset=True),
                self.raw,
            ),
            compute=self.ray.data.ActorPoolStrategy(size=actors),
            batch_size=group,
            batch_format="pyarrow",
            **resources,
        )
        try:
            for record in answered.iter_rows():
                outcome = unpack(record["outcome"])
                id_ = outcome.id if isinstance(outcome, BadRow) else outcome["id"]
                # An engine that dies is started again with its group; what it had given is not given twice.
                if id_ in waiting:
                    waiting.remove(id_)
                    yield outcome
        except self.ray.exceptions.RayError as exc:
            raise ScaleError(f"an engine failed: {cause_of(exc)}") from exc
        if waiting:
            raise ScaleError(
                f"Ray gave no answer for {len(waiting)} rows, {min(waiting)!r} first; run it again"
            )

    def _dataset(self, first: Row, rows: Iterator[Row], group: int) -> tuple[Any, set[str]]:
        """Rows as tables in the object store, ``group`` rows each; and their ids."""
        arrow = need("pyarrow", "--ray", "ray")
        context = self.ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.verbose_stats_logs = False
        source, tables = chain([first], rows), []
        ids: set[str] = set()
        while part := list(islice(source, group)):
            ids.update(row.id for row in part)
            tables.append(self.ray.put(arrow.table({"row": [json.dumps(asdict(row)) for row in part]})))
        return self.ray.data.from_arrow_refs(tables), ids


BUSY = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_register_timeout_seconds": "300",
}
"""What a cluster that is started here needs on a machine that does other work too. By default Ray's workers, engines
among them, give way to every other process (niceness 15), and Ray gives up on a worker that is not there after 60 s,
Ray Serve on its door, and so on serving, after 5 s."""


def connect(ray: Any, args: RayArgs) -> None:
    """Join the cluster that is named, or start one on this machine."""
    # Its reports of an error run over pages; the error itself is raised, and --debug shows all of it.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = args.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        options |= {"include_dashboard": False}
        for name, value in BUSY.items():
            os.environ.setdefault(name, value)
    try:
        ray.init(address=address, **options, **(args.init or {}))
    except (ConnectionError, ValueError) as exc:
        raise ScaleError(f"--ray-address {address}: {cause_of(exc)}") from exc


def cause_of(exc: BaseException) -> str:
    """One line for an error of Ray: what the engine itself said, where Ray tells."""
    inner = getattr(exc, "cause", None)
    if isinstance(inner, FlashDLLMError):
        return " ".join(str(inner).split())
    if isinstance(inner, BaseException):
        return f"{type(inner).__name__}: {' '.join(str(inner).split())}"
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [type(exc).__name__])[-1]
