"""From a checkpoint's name to a Model: find it, check every tensor before memory is taken, stream it in."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from flash_dllm.kernels.linear import Matrix
from flash_dllm.kernels.ranks import VocabShard
from flash_dllm.models import family_of
from flash_dllm.models.config import ModelConfig, ModelError, read_json
from flash_dllm.models.layers import Model, Slot, empty_model, tensor_map
from flash_dllm.models.shards import TensorHeader, open_shard, read_headers

BUNDLED = ("flash-dllm/tiny-llada", "flash-dllm/tiny-dream", "flash-dllm/tiny-guide")
_BUNDLED_ROOT = Path(__file__).parent.parent / "weights"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1}
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Form:
    """How a checkpoint's weights are held.

    Attributes:
        matrix: given a device, what allocates a layer's matrix [rows, columns] there; None for plain tensors.
        split: given the checkpoint's config, that of this rank's part and its rows of the vocabulary; None for all.
    """

    matrix: Callable[[torch.device | str], Callable[[int, int], Matrix]] | None = None
    split: Callable[[ModelConfig], tuple[ModelConfig, VocabShard]] | None = None


def is_local(source: str | Path) -> bool:
    """Whether ``source`` is a bundled name or an existing path, and not an id on the hub."""
    return str(source) in BUNDLED or Path(source).exists()


def resolve(source: str | Path, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a model: a bundled name, a folder, or a hub id (fetched at ``revision``).

    A bundled name wins over a folder of that name. ``weights=False`` fetches only the small files from the
    hub. Raises ModelError if there is no such model, if the hub cannot be reached, or if ``revision`` is
    given for something that is not on the hub.
    """
    name = str(source)
    if not is_local(source):
        if name.startswith("flash-dllm/"):
            raise ModelError(f"{name}: no such bundled model; there are {', '.join(BUNDLED)}")
        if isinstance(source, Path) or not _HUB_ID.fullmatch(name):
            raise ModelError(
                f"{name}: no such folder, and not the name of a bundled model or of one on the hub"
            )
        return _fetch(name, revision, weights)
    if revision is not None:
        raise ModelError(f"{name}: revision {revision!r} applies to models of the Hugging Face hub only")
    if name in BUNDLED:
        path = _BUNDLED_ROOT / name.removeprefix("flash-dllm/")
        if not path.is_dir():
            raise ModelError(f"{name}: not part of this installation ({path} is missing)")
        return path
    if not Path(source).is_dir():
        raise ModelError(f"{name}: is a file, not a model folder")
    return Path(source)


def _fetch(name: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub

    files = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as exc:  # the hub client raises its own, the HTTP library's and the system's errors
        reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{name}: no such folder, nor fetched from the Hugging Face hub{at} ({reason})"
        ) from exc


def read_config(folder: Path, mask_id: int | None = None) -> ModelConfig:
    """The config of a model folder. Raises ModelError, naming key and value, for what is not supported."""
    file = folder / "config.json"
    raw = read_json(file)
    config: ModelConfig = family_of(raw, str(file)).parse(raw, str(file), mask_id)
    return config


def load_model(
    source: str | Path,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    mask_id: int | None = None,
    form: Form | None = None,
) -> Model:
    """Load a checkpoint into packed weights on ``device``.

    ``source`` and ``revision``: see ``resolve``. ``dtype`` is float32, bfloat16, float16 or "auto", the dtype
    that config.json names, else the one that all tensors are stored in. ``mask_id`` overrides the config's
    mask token. ``form``: quantised, or one rank's part. Host memory peaks at the weights (if ``device`` is the
    CPU) plus one shard, which is mapped and not copied, and one tensor where a weight is quantised. Raises
    ModelError, naming file and key or tensor, for everything that is wrong with the checkpoint.
    """
    folder = resolve(source, revision)
    checkpoint = Checkpoint(folder, mask_id)
    model = _allocate(checkpoint.config, checkpoint.pick_dtype(dtype), device, form or Form())
    checkpoint.fill(model)
    return model


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, form: Form) -> Model:
    shard = None
    if form.split is not None:
        config, shard = form.split(config)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:  # torch built without CUDA raises AssertionError
        raise ModelError(f"device = {str(device)!r}: {next(iter(str(exc).splitlines()), exc)}") from exc
    try:
        return empty_model(config, dtype, device, form.matrix and form.matrix(device), shard)
    except RuntimeError as exc:  # includes torch.OutOfMemoryError
        size = f"{config.n_parameters * dtype.itemsize / 1e9:.1f} GB in {dtype}"
        size = f"{config.n_parameters / 1e9:.1f} G parameters, most in 8 bits," if form.matrix else size
        raise ModelError(f"weights of {size} do not fit on device {device}") from exc


class Checkpoint:
    """A folder's config and tensor headers, checked against each other. No weight is read before ``fill``.

    Raises ModelError, naming file and key or tensor, for everything that is wrong.
    """

    def __init__(self, folder: Path, mask_id: int | None = None) -> None:
        self.folder = folder
        self.where = str(folder / "config.json")
        self.raw = read_json(folder / "config.json")
        family = family_of(self.raw, self.where)
        self.config: ModelConfig = family.parse(self.raw, self.where, mask_id)
        self.int8_rows = _is_int8_rows(self.raw, self.where)
        self.names = family.NAMES
        self.slots = tensor_map(self.config, self.names)
        self.headers = read_headers(folder)
        self._check_tensors()

    def _check_tensors(self) -> None:
        stored_int8 = {n for n, h in self.headers.items() if h.dtype == "I8"} if self.int8_rows else set()
        scales = {f"{name}.scale": name for name in stored_int8 & self.slots.keys()}
        for name in (*self.slots, *scales):
            if name not in self.headers:
                raise ModelError(f"{self.folder}: missing tensor {name}")
        for name, header in self.headers.items():
            if name in scales:
                self._check(name, self.slots[scales[name]].shape[:1], ("F32",))
            elif name in self.slots:
                shape = self.slots[name].shape
                int8 = ("I8",) if self.int8_rows and len(shape) == 2 else ()
                self._check(name, shape, (*int8, *_STORED))
            else:
                raise ModelError(f"{header.file}: unexpected tensor {name}")

    def _check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        header = self.headers[name]
        if header.shape != shape:
            raise ModelError(
                f"{header.file}: tensor {name} has shape {list(header.shape)}, expected {list(shape)}"
            )
        if header.dtype not in dtypes:
            raise ModelError(
                f"{header.file}: tensor {name} has dtype {header.dtype}, expected {' or '.join(dtypes)}"
            )

    def pick_dtype(self, wanted: torch.dtype | str) -> torch.dtype:
        """The dtype to compute in: see ``load_model``."""
        wanted = str(wanted).removeprefix("torch.")
        if wanted in DTYPES:
            return DTYPES[wanted]
        if wanted != "auto":
            raise ModelError(f"dtype = {wanted!r}: not supported, only auto, {', '.join(DTYPES)}")
        for key in ("dtype", "torch_dtype"):
            if self.raw.get(key) is None:
                continue
            if self.raw[key] not in DTYPES:
                raise ModelError(
                    f"{self.where}: {key} = {self.raw[key]!r}: not supported, only {', '.join(DTYPES)}"
                )
            return DTYPES[self.raw[key]]
        stored = {header.dtype for header in self.headers.values()}
        if len(stored) > 1 or "F64" in stored:
            kinds = ", ".join(sorted(stored))
            raise ModelError(
                f"{self.where}: no key 'torch_dtype', and tensors are stored as {kinds}: name a dtype"
            )
        return _STORED[stored.pop()]

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of the tensors in the files, by stored dtype."""
        found: Counter[str] = Counter()
        for header in self.headers.values():
            found[header.dtype] += math.prod(header.shape) * _ITEMSIZE[header.dtype]
        return dict(found)

    def fill(self, model: Model) -> None:
        """Copy every tensor, or the part of it that ``model`` holds, into ``model``, one file after the other."""
        mine = self.slots if model.shard is None else tensor_map(model.config, self.names)
        by_file: dict[Path, list[str]] = {}
        for name in self.slots:
            by_file.setdefault(self.headers[name].file, []).append(name)
        for file, names in by_file.items():
            with open_shard(file) as shard:
                for name in names:
                    cut = _cut(self.slots[name].shape, mine[name], model.shard)
                    mine[name].write(model, self._read(shard, name, cut), name)

    def _read(self, shard: Any, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
        tensor = _get(shard, self.headers[name], name, cut)
        if self.headers[name].dtype != "I8":
            return tensor
        scale = self.headers[f"{name}.scale"]
        with open_shard(scale.file) as other:
            return tensor.float() * _get(other, scale, f"{name}.scale", cut[:1])[:, None]


def _cut(whole: tuple[int, ...], mine: Slot, shard: VocabShard | None) -> tuple[slice, ...]:
    """The part of a stored tensor that a rank holds, given the shape of the whole and the rank's slot; () for all."""
    if shard is None:
        return ()
    if mine.part == "head":
        return slice(shard.start, shard.stop), slice(0, whole[1])
    cuts = []
    for full, part in zip(whole, mine.shape, strict=True):
        # Where there are fewer parts than ranks (heads of keys and values), neighbours hold the same one.
        start = shard.ranks.rank * (full // part) // shard.ranks.size * part
        cuts.append(slice(start, start + part))
    return tuple(cuts)


def _get(shard: Any, header: TensorHeader, name: str, cut: tuple[slice, ...]) -> torch.Tensor:
    try:
        tensor: torch.Tensor = shard.get_slice(name)[cut] if cut else shard.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as exc:
        raise ModelError(f"{header.file}: tensor {name} cannot be read ({exc})") from exc
    return tensor


def _is_int8_rows(raw: Mapping[str, Any], where: str) -> bool:
    """Whether matrices may be stored as int8 [out, in] with a float32 scale [out], as bundled models are."""
    found = raw.get("quantization_config")
    if found is None:
        return False
    if found != {"quant_method": "int8_rows"}:
        raise ModelError(f"{where}: quantization_config = {found!r}: not supported")
    return True
