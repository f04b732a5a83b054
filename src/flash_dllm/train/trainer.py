"""One training stage: starts the data workers, trains until the clock says stop, saves, exports, measures.

Files written to the output folder: `state.safetensors` (to resume), `export/` (the model), `loss.jsonl` (one
line every few steps), `eval.json` (losses, accuracy, counts, versions).
"""

from __future__ import annotations

import json
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dllm.train.checkpoint import load_state, save_state
from flash_dllm.train.data import Loader, Source
from flash_dllm.train.evaluate import LEFT_TO_RIGHT, SETTINGS, accuracy, held_batch, loss_by_noise
from flash_dllm.train.export import export, round_to_int8
from flash_dllm.train.model import StackedTransformer, rope_tables
from flash_dllm.train.objective import corrupt, loss_of
from flash_dllm.train.optim import Optimizer
from flash_dllm.train.recipes import Recipe
from flash_dllm.train.schedule import Clock
from flash_dllm.train.tasks import Split
from flash_dllm.train.tokenizer import bundled_folder

# Seeds of a stage start here times the stage's number, so that no sample is used twice.
_STAGE_SEEDS = 10**10
_SYNC_EVERY = 8
_HELD_EVERY = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a stage needs beside its recipe. `budget` is in seconds and counts from `start` (monotonic)."""

    stage: str
    budget: float
    out: Path
    start: float
    resume: Path | None = None
    device: str = "cuda"
    workers: int = 8
    compiled: bool = True
    tokenizer: Path = field(default_factory=bundled_folder)


class Trainer:
    """Runs one stage of a recipe."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        if options.stage not in recipe.stages:
            raise ValueError(
                f"recipe {recipe.name} has stages {sorted(recipe.stages)}, not {options.stage!r}"
            )
        self.recipe, self.options = recipe, options
        self.device = torch.device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        self.log = (options.out / "loss.jsonl").open("w", encoding="utf-8")
        number = sorted(recipe.stages).index(options.stage)
        self.source = Source(recipe.tokens, str(options.tokenizer), number * _STAGE_SEEDS, recipe.free_form)
        self.loader = Loader(self.source, options.workers)
        self.clock = Clock(options.budget, recipe.reserve, recipe.stages[options.stage], start=options.start)
        gpu = self.device.type == "cuda"
        self.model = StackedTransformer(recipe.shape, compiled=options.compiled and gpu, seed=recipe.seed)
        self.model.to(self.device, torch.bfloat16 if gpu else torch.float32)
        # The cast above would round the rotation tables too; they stay float32.
        self.model.tables = rope_tables(recipe.shape).to(self.device)
        self.optimizer = Optimizer(self.model, recipe.rates)
        self.warm = False
        if options.resume is not None:
            tensors, meta = load_state(options.resume)
            tensors = {name: t.to(self.device) for name, t in tensors.items()}
            self.warm = self.optimizer.load(tensors, meta["steps"], meta.get("fresh_at", 0))
        self.generator = torch.Generator(device=self.device)

    def run(self) -> dict[str, Any]:
        """Trains, saves and measures; returns the content of eval.json."""
        try:
            with self._attention():
                report = self._train()
        finally:
            self.loader.close()
        report |= self._save()
        self._write(report)
        with self._attention():
            report |= self._measure()
        self._write(report)
        self.log.close()
        return report

    @property
    def _last(self) -> bool:
        """Whether this stage ends the plan."""
        return self.recipe.stages[self.options.stage][1] >= 1.0

    def _attention(self) -> AbstractContextManager[None]:
        """Flash attention on the GPU: its start-up does not depend on the shape, unlike cuDNN's plans."""
        if self.device.type != "cuda":
            return nullcontext()
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    def _train(self) -> dict[str, Any]:
        recipe, clock = self.recipe, self.clock
        held = held_batch(self.source, recipe.tokens // 256).to(self.device)
        sums = torch.zeros(2, device=self.device)
        step, logged, next_held, tokens = 0, 0, 0.0, 0
        for packed in self.loader:
            if step < 2:
                # The schedule does not count start-up, nor the first step, which compiles.
                self._synchronize()
                clock.begin()
            if clock.over():
                break
            factor = recipe.curve.factor(clock.progress(), step, self.warm)
            sums += self._step(packed, factor)
            tokens += packed.size
            step += 1
            if step % _SYNC_EVERY == 0:
                self._synchronize()
            if step % recipe.log_every == 0:
                objective, entropy = (sums / (step - logged)).tolist()
                line = {
                    "step": self.optimizer.steps,
                    "seconds": round(clock.elapsed, 1),
                    "factor": round(factor, 4),
                    "loss": round(objective, 5),
                    "masked_nll": round(entropy, 5),
                    "progress": round(clock.progress(), 4),
                    "tokens": tokens,
                    "waits": self.loader.waited,
                }
                if clock.elapsed >= next_held:
                    with self.model.eager():
                        line["held"] = loss_by_noise(self.model, held)
                    next_held = clock.elapsed + _HELD_EVERY
                    print(f"{recipe.name} {json.dumps(line)}", flush=True)
                self.log.write(json.dumps(line) + "\n")
                self.log.flush()
                sums.zero_()
                logged = step
        self._synchronize()
        seconds = clock.elapsed - clock._begun
        with self.model.eager():
            final = loss_by_noise(self.model, held)
        return {
            "recipe": recipe.name,
            "stage": self.options.stage,
            "steps": step,
            "tokens": tokens,
            "train_seconds": round(seconds, 1),
            "tokens_per_second": round(tokens / max(seconds, 1e-6)),
            "startup_seconds": round(clock._begun, 1),
            "held": final,
            "loader_waits": self.loader.waited,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "shape": asdict(recipe.shape),
            "rates": asdict(recipe.rates),
            "curve": asdict(recipe.curve),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }

    def _step(self, packed: Any, factor: float) -> Tensor:
        """One update; returns float32 [2] (objective, masked cross entropy) without waiting for the
        device.
        """
        shape = self.recipe.shape
        self.generator.manual_seed(self.recipe.seed * 1_000_003 + self.optimizer.steps)
        ids = torch.from_numpy(packed.copy())
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        batch = corrupt(ids, shape.shift, shape.causal, self.recipe.capacity, self.generator)
        loss, entropy = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step(factor)
        return torch.stack((loss.detach(), entropy))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _save(self) -> dict[str, Any]:
        """State and export. A stage that ends its plan needs no moments, so only the masters are kept."""
        tensors = self.optimizer.tensors()
        if self._last:
            tensors = {name: t for name, t in tensors.items() if name.startswith("master.")}
        meta = {
            "steps": self.optimizer.steps,
            "fresh_at": self.optimizer.fresh_at,
            "recipe": self.recipe.name,
            "stage": self.options.stage,
        }
        path = save_state(self.options.out, tensors, meta)
        export(self.recipe.shape, self.optimizer.masters, self.options.out / "export", self.options.tokenizer)
        size = (self.options.out / "export" / "model.safetensors").stat().st_size
        print(f"{self.recipe.name} saved after {self.clock.elapsed:.1f} s", flush=True)
        return {"state_bytes": path.stat().st_size, "export_bytes": size}

    def _measure(self) -> dict[str, Any]:
        """Accuracy of the exported (int8) weights, and what the rounding costs in held-out loss."""
        held = held_batch(self.source, self.recipe.tokens // 256).to(self.device)
        rounded = round_to_int8(self.optimizer.masters)
        with torch.no_grad(), self.model.eager():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(rounded[name])
            result: dict[str, Any] = {"held_int8": loss_by_noise(self.model, held)}
            began = time.monotonic()
            until = self.options.start + self.clock.budget - 2.0
            settings = (
                LEFT_TO_RIGHT if self.recipe.shape.causal else (SETTINGS[1], SETTINGS[0], *SETTINGS[2:])
            )
            # Decisions are made on dev; only a finished model meets the test questions.
            splits: tuple[Split, ...] = ("test" if self._last else "dev", "heldout")
            result["accuracy"] = accuracy(
                self.model.logits,
                self.recipe.eval_samples,
                settings,
                self.options.tokenizer,
                self.device,
                splits,
                until,
            )
        result["eval_seconds"] = round(time.monotonic() - began, 1)
        return result

    def _write(self, report: dict[str, Any]) -> None:
        text = json.dumps(report, indent=1)
        (self.options.out / "eval.json").write_text(text + "\n", encoding="utf-8")
