"""Parquet: records of a table, and the table of a batch's answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from flash_dllm.scale.extras import ScaleError, need

READ_ROWS = 1024
"""Rows that are in memory at a time while a file is read."""


def read_table(data: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Records of an open Parquet file, in order.

    Raises:
        ScaleError: not a Parquet file, or a column is missing.
    """
    file = _open(data, name)
    missing = set(columns or ()) - set(file.schema_arrow.names)
    if missing:
        raise ScaleError(f"{name}: no column {min(missing)!r}")
    for batch in file.iter_batches(READ_ROWS, columns=columns):
        yield from batch.to_pylist()


def row_count(data: Any, name: str) -> int:
    """Rows of an open Parquet file."""
    return int(_open(data, name).metadata.num_rows)


def _open(data: Any, name: str) -> Any:
    parquet = need("pyarrow.parquet", "Parquet", "ray")
    try:
        return parquet.ParquetFile(data)
    except ValueError as exc:  # pyarrow's ArrowInvalid is one
        raise ScaleError(f"{name}: not a Parquet file ({exc})") from exc


def table_bytes(records: Sequence[dict[str, Any]]) -> bytes:
    """A Parquet file of answers. Every file has the same columns, whatever its rows have."""
    arrow = need("pyarrow", "Parquet", "ray")
    parquet = need("pyarrow.parquet", "Parquet", "ray")
    rows = [{**_flat(record), "metadata": json.dumps(record["metadata"]) if "metadata" in record else None}
            for record in records]  # fmt: skip
    out = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema=_schema(arrow)), out)
    return out.getvalue()


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    """One type a column: a stop token's id becomes text."""
    flat = dict(answer)
    if flat.get("stop_reason") is not None:
        flat["stop_reason"] = str(flat["stop_reason"])
    if flat.get("choices") is not None:
        flat["choices"] = [_flat(choice) for choice in flat["choices"]]
    return flat


def _schema(arrow: Any) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    usage = arrow.struct({
        "prompt_tokens": whole, "completion_tokens": whole, "total_tokens": whole, "nfe": whole, "steps": whole,
        "tpf": real,
    })  # fmt: skip
    certificate = arrow.struct({
        "total_variation": real, "by_confidence": whole, "by_verification": whole, "unbounded": whole,
        "vacuous": arrow.bool_(), "assumes": text,
    })  # fmt: skip
    answer = {
        "text": text, "finish_reason": text, "stop_reason": text, "usage": usage, "spans": arrow.list_(text),
        "token_ids": arrow.list_(whole), "log_probs": arrow.list_(real), "passes": arrow.list_(whole),
        "certificate": certificate,
    }  # fmt: skip
    choices = arrow.list_(arrow.struct(answer))
    return arrow.schema({"id": text, **answer, "choices": choices, "metadata": text})
