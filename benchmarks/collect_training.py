"""One small JSON file from the output folders of a model's training stages, in order, for a model card.

    python benchmarks/collect_training.py OUT.json STAGE_FOLDER... --device NAME --date DAY
        [--command TEXT]... [--note TEXT] [--every 500]

The loss curve is thinned to a line about every so many steps, lines with held-out losses before others.
Accuracy is that of the last stage, with its first right and first wrong word problem of the test split.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

STAGE = ("stage", "steps", "tokens", "train_seconds", "startup_seconds", "tokens_per_second", "loader_waits")
MODEL = ("parameters", "shape", "rates", "curve", "versions", "export_bytes", "held", "held_int8")


def thinned(lines: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """The best line of each `every` steps (one with held-out losses if there is one), and the last line."""
    chosen: dict[int, dict[str, Any]] = {}
    for line in lines:
        kept = chosen.setdefault(line["step"] // every, line)
        if "held" in line and "held" not in kept:
            chosen[line["step"] // every] = line
    result = list(chosen.values())
    return result if result[-1] is lines[-1] else [*result, lines[-1]]


def collect(folders: list[Path], commands: list[str], every: int) -> dict[str, Any]:
    """What the stages wrote, without anything that depends on where they ran."""
    reports = [json.loads((folder / "eval.json").read_text(encoding="utf-8")) for folder in folders]
    stages, curve = [], []
    for folder, report, command in zip(folders, reports, commands, strict=True):
        stages.append({key: report[key] for key in STAGE} | {"command": command})
        lines = (folder / "loss.jsonl").read_text(encoding="utf-8").splitlines()
        curve += [
            {"stage": report["stage"], **line} for line in thinned([json.loads(x) for x in lines], every)
        ]
    last = reports[-1]
    accuracy = last["accuracy"]
    problems = [e for e in accuracy["examples"] if (e["family"], e["split"]) == ("gsm", "test")]
    return {
        "recipe": last["recipe"],
        **{key: last[key] for key in MODEL},
        "stages": stages,
        "stopped_early": accuracy["stopped_early"],
        "tables": accuracy["tables"],
        "examples": list({example["right"]: example for example in reversed(problems)}.values()),
        "loss": curve,
    }


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each entry of the long parts."""
    parts = []
    for key, value in report.items():
        if isinstance(value, list) and value:
            inner = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        elif key == "tables":
            inner = ",\n".join(
                f"  {json.dumps(name)}: {{\n"
                + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
                + "\n  }"
                for name, table in value.items()
            )
            parts.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--device", required=True)
    parser.add_argument("--date", required=True)
    parser.add_argument("--command", action="append", help="what ran a stage; as often as there are stages")
    parser.add_argument("--note", default="")
    parser.add_argument("--every", type=int, default=500)
    args = parser.parse_args()
    commands = args.command or [""] * len(args.folders)
    report = {"date": args.date, "device": args.device, "note": args.note}
    args.out.write_text(text_of(report | collect(args.folders, commands, args.every)), encoding="utf-8")


if __name__ == "__main__":
    main()
