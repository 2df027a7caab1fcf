"""Inspects a Hugging Face checkpoint through the headers of its safetensors files.

Needs neither torch nor safetensors: preflight runs it on a login node before a job is queued.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rpg_megatron.checkpoints.hf_forms import Form, decoder_tensors, form_of, join_scales
from rpg_megatron.checkpoints.megatron_folder import weights_of
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import open_regular, parse_json, places_of, read_json
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS
from rpg_megatron.system.terminal import one_line

if TYPE_CHECKING:
    from rpg_megatron.config.model_shape import ModelShape
    from rpg_megatron.models.mapping import ModelMapping

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
CONFIGURATION = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files besides the weights: configuration, tokenizer, chat template."""

UNTRAINED = "untrained.safetensors"
"""In a folder of configuration without weights: the tensors that are not trained."""

HEAD = "lm_head.weight"
_COMPUTED = (
    ".rotary_emb.inv_freq",
    ".rotary_pos_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
)
"""Ends of names of buffers that old versions have saved; config.json determines them, and vLLM passes over
the same names."""
_CHUNK = 1 << 20  # numbers compared at a time

MAX_DIMENSIONS = 64
"""Maximum dimensions of a tensor, as in torch."""
_POINTER = b"version "
"""How a file begins that Git LFS has left in place of weights."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum of the safetensors format; a larger number means that the file has another format."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of one safetensors file, after a check of the file's size against its header.

    As the format requires, the tensors are stored without gaps or overlaps.
    Raises UserError if the file is missing, truncated, longer than its header says, or not safetensors.
    """
    try:
        with open_regular(file) as f:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            if prefix == _POINTER:
                raise UserError(f"{file}: a pointer of Git LFS, not the weights; run git lfs pull there")
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _corrupt(file, f"{size} bytes are fewer than its header")
            raw: dict[str, Any] = parse_json(f.read(length))
        raw.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(raw.items(), key=lambda item: item[1]["data_offsets"]):
            shape = _shape(file, name, entry["shape"])
            tensors[name] = tensor = StoredTensor(file, str(entry["dtype"]), shape, 8 + length + end, name)
            start, end = end, _offset(file, name, entry["data_offsets"], end)
            dtype = SAFETENSORS.get(tensor.dtype)
            if dtype and end - start != ITEM_BYTES[dtype] * math.prod(tensor.shape):
                raise _corrupt(file, f"{name} has {end - start} bytes, which does not match its shape")
        expected = 8 + length + end
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _corrupt(file, f"its header cannot be parsed ({type(e).__name__}: {e})") from None
    if size != expected:
        raise _corrupt(file, f"{size} bytes on disk, {expected} according to its header")
    return tensors


def _shape(file: Path, name: str, shape: Any) -> tuple[int, ...]:
    if len(shape) > MAX_DIMENSIONS:
        raise _corrupt(file, f"{name} has {len(shape):,} dimensions, more than {MAX_DIMENSIONS}")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise _corrupt(file, f"{name} has an invalid shape")
    if math.prod(shape) >= 2**60:
        raise _corrupt(file, f"{name} is larger than any file")
    return tuple(shape)


def _offset(file: Path, name: str, offsets: Any, expected: int) -> int:
    """End of a tensor's bytes, which must start where the previous tensor ends."""
    begin, end = offsets
    if begin != expected or type(end) is not int or end < begin:
        raise _corrupt(
            file, f"{name} is at bytes {begin} to {end}, but the previous tensor ends at {expected}"
        )
    return end


def list_checkpoint(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, in one file or in several with an index, or in Megatron's format.

    Raises UserError if there is no checkpoint, if a file that the index names is missing or corrupt, or if
    another reader would take other tensors: vLLM takes all that is in the files, whatever the index says, and
    without an index every file; transformers prefers ``SINGLE`` to the index. Also for ``join_scales``.
    """
    if weights_of(model_dir) is not None:
        from rpg_megatron.checkpoints.megatron_tensors import (
            open_tensors,  # msgspec, which a login node may lack
        )

        megatron = open_tensors(model_dir)
        assert megatron is not None
        return megatron.stored()
    stored, wrong = join_scales(_list_files(model_dir))
    if wrong:
        raise UserError(
            f"{model_dir}: weights in FP8 need scales of blocks of 128 x 128 in float32, each beside its "
            f"tensor; copy the model again, or give it in bfloat16: {_some(wrong)}"
        )
    return stored


def _list_files(model_dir: Path) -> dict[str, StoredTensor]:
    single, index = model_dir / SINGLE, model_dir / INDEX
    if not index.exists():
        if not single.exists():
            raise UserError(
                f"{model_dir}: holds neither {SINGLE} nor {INDEX}; give the folder of an HF checkpoint"
            )
        if others := sorted(file.name for file in model_dir.glob("*.safetensors") if file != single):
            raise UserError(
                f"{model_dir}: holds {_some(others)} besides {SINGLE}, and no {INDEX}, so that engines would "
                "read all of them; move what is not of this model to another folder"
            )
        return read_header(single)
    try:
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if not name or Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not the name of a file in this folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise _corrupt(index, f"not a valid index ({type(e).__name__}: {e})") from None
    if single.exists() and SINGLE not in names:
        raise UserError(
            f"{model_dir}: holds {SINGLE}, which {INDEX} does not list; remove the older one of the two"
        )
    files, damage = {}, []
    for name in names:
        try:
            files[name] = read_header(model_dir / name)
        except UserError as e:
            damage.append(str(e))
    if damage:
        raise UserError("\n  ".join(damage))
    lost = [f"{name} (not in {file})" for name, file in weight_map.items() if name not in files[file]]
    if lost:
        raise UserError(
            f"{index}: lists tensors that their files lack: {_some(lost)}; copy the checkpoint again"
        )
    tensors = {name: files[file][name] for name, file in weight_map.items()}
    for file, stored in files.items():
        if twice := [name for name in stored if weight_map.get(name, file) != file]:
            raise UserError(
                f"{model_dir / file}: holds tensors that are in another file according to {INDEX}: "
                f"{_some(twice)}; copy the checkpoint again"
            )
        tensors |= {name: tensor for name, tensor in stored.items() if name not in tensors}
    return tensors


def find_form(model_dir: Path, shape: ModelShape) -> Form:
    """How the files of a model have its tensors; for weights in Megatron's format, as the model had them.

    Raises UserError as ``list_untrained``.
    """
    if not shape.untrained and (shape.experts is None or not _has_files(model_dir)):
        return Form()
    return form_of(_list_all(model_dir), shape.untrained)


def stored_bytes(tensor: StoredTensor) -> int:
    """Size of a tensor."""
    return ITEM_BYTES.get(SAFETENSORS.get(tensor.dtype, ""), 1) * math.prod(tensor.shape)


def list_untrained(model_dir: Path, shape: ModelShape) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint that are not the decoder's. Raises UserError if its files are not there."""
    if not shape.untrained:
        return {}
    return {n: tensor for n, tensor in _list_all(model_dir).items() if n.startswith(shape.untrained)}


def _list_all(model_dir: Path) -> dict[str, StoredTensor]:
    """As ``list_checkpoint``; beside Megatron's weights, the tensors that these do not have."""
    if any((model_dir / name).exists() for name in (INDEX, SINGLE)):
        return list_checkpoint(model_dir)
    if not _has_files(model_dir):
        raise UserError(
            f"{model_dir}: lacks the tensors that are not trained, such as a vision tower's; give the folder "
            f"of the whole model, or of a converted one with its {UNTRAINED}"
        )
    return read_header(model_dir / UNTRAINED)


def _has_files(model_dir: Path) -> bool:
    return any((model_dir / name).exists() for name in (INDEX, SINGLE, UNTRAINED))


def list_computed(stored: Iterable[str]) -> list[str]:
    """The names of buffers that follow from config.json, and are not read."""
    return [name for name in stored if f".{name}".endswith(_COMPUTED)]


def describe_stored(stored: Mapping[str, StoredTensor]) -> str:
    """One phrase about the buffers of ``list_computed``, and about weights in FP8; empty without any."""
    names, fp8 = list_computed(stored), sum(tensor.scale is not None for tensor in stored.values())
    said = [f"{len(names)} buffers are not read ({_some(names[:2])}): config.json has them"] * bool(names)
    said += [f"{fp8} tensors in FP8 are read as bfloat16, which engines and exports have"] * bool(fp8)
    return "; ".join(said)


def open_copied(model_dir: Path, root: Path | None = None) -> Iterator[tuple[str, BinaryIO]]:
    """The files to copy with a checkpoint's weights, open: configuration, tokenizer, chat template, by name.

    root: the folder that the user has named, by default ``model_dir``. Raises UserError for a file that is
    not regular, and for a symbolic link to outside that folder: more users might be able to read the copy
    than the file. Links into the blobs of the folder's Hugging Face cache (``snapshots/REVISION``) are
    followed. Checked is the open file, so a link that is changed before the copy has no effect.
    """
    inside = places_of(root or model_dir)
    try:
        names = [n for n in sorted(os.listdir(model_dir)) if any(fnmatchcase(n, p) for p in CONFIGURATION)]
    except OSError as e:
        raise UserError(f"{model_dir}: cannot be listed ({e.strerror})") from None
    for name in names:
        if name == INDEX:
            continue
        try:
            file = open_regular(model_dir / name, *inside)
        except OSError as e:
            fix = "copy the file into it" if e.errno == errno.EXDEV else "remove it, or copy the model again"
            raise UserError(f"{model_dir / name}: {e.strerror}; {fix}") from None
        with file:
            yield name, file


def list_copied(model_dir: Path, root: Path | None = None) -> list[str]:
    """Names of the files of ``open_copied``, all of which can be copied. Raises UserError as it does."""
    return [name for name, _ in open_copied(model_dir, root)]


def verify_hf_checkpoint(
    model_dir: Path, mapping: ModelMapping, *, one_dtype: bool = False
) -> dict[str, StoredTensor]:
    """Check that a checkpoint has exactly the tensors of the mapping; returns them by name.

    Left out are what is not trained (``list_untrained``), buffers that follow from config.json, and with tied
    embeddings a ``lm_head.weight`` that equals the embedding, for which both are read. ``one_dtype``: all
    tensors must have the same dtype.
    Raises one UserError that lists every missing, unexpected and wrongly shaped tensor, or the corrupt files;
    also for a head that is not the embedding: transformers and vLLM use it in spite of config.json.
    """
    experts = mapping.shape.experts
    # One more than there are, so that it is named below.
    most = 0 if experts is None else experts.count + 1
    stored, twice = decoder_tensors(list_checkpoint(model_dir), most)
    if not mapping.shape.fp8_files and any(tensor.scale is not None for tensor in stored.values()):
        raise UserError(
            f"{model_dir}: has weights in FP8, and config.json no quantization_config; copy the model again"
        )
    if twice:
        raise UserError(f"{model_dir}: has tensors under two names: {_some(twice)}; remove one of each")
    untrained = [name for name in stored if name.startswith(mapping.shape.untrained)]
    for name in [*list_computed(stored), *untrained]:
        stored.pop(name, None)
    head = stored.pop(HEAD, None) if mapping.shape.tied_embeddings else None
    described = f"config.json ({mapping.shape.family}, {mapping.shape.num_layers} layers)"
    check_stored(model_dir, stored, mapping, described, one_dtype=one_dtype)
    embedding = f"{mapping.shape.prefix}embed_tokens.weight"
    if head is not None and not _equal(head, stored[embedding]):
        raise UserError(
            f"{head.file}: {HEAD} differs from {embedding}, and config.json says that they are one "
            "(tie_word_embeddings is true); set tie_word_embeddings to false there, or remove the tensor if "
            "the embedding is the output layer"
        )
    return stored


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same shape and numbers, of whichever dtypes, but not with scales."""
    if a.shape != b.shape or a.dtype not in SAFETENSORS or a.scale or b.scale:
        return False
    left = math.prod(a.shape)
    with open_regular(a.file) as one, open_regular(b.file) as other:
        one.seek(a.begin)
        other.seek(b.begin)
        while left > 0:
            count = min(left, _CHUNK)
            x, y = (f.read(count * ITEM_BYTES[SAFETENSORS[t.dtype]]) for f, t in ((one, a), (other, b)))
            if (x != y or a.dtype != b.dtype) and not _same_numbers(x, a.dtype, y, b.dtype):
                return False
            left -= count
    return True


def _same_numbers(x: bytes, kind: str, y: bytes, other: str) -> bool:
    import numpy as np  # late: bytes are nearly always enough

    def read(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
        if dtype == "BF16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        return np.frombuffer(data, SAFETENSORS[dtype])

    return np.array_equal(read(x, kind), read(y, other))


def check_stored(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    mapping: ModelMapping,
    described: str,
    *,
    one_dtype: bool = False,
) -> None:
    """Check that the stored tensors are those of the mapping, as ``verify_hf_checkpoint``.

    described: what says which tensors there should be, for the message.
    """
    expected = mapping.hf_tensors()
    problems = []
    if missing := [n for n in expected if n not in stored]:
        tied = "; if the embedding is the output layer, set tie_word_embeddings to true"
        problems.append(f"missing: {_some(missing)}{tied if missing == [HEAD] else ''}")
    if unexpected := [n for n in stored if n not in expected]:
        problems.append(
            f"unexpected: {_some(unexpected)}; give the model of config.json, unquantised if these are "
            "scales, or remove what it does not use"
        )
    if shapes := [
        f"{n} is {list(stored[n].shape)}, not {list(s)}"
        for n, s in expected.items()
        if n in stored and stored[n].shape != s
    ]:
        problems.append(f"wrong shape: {_some(shapes)}")
    if types := [
        f"{n} is {stored[n].dtype}" for n in expected if n in stored and stored[n].dtype not in SAFETENSORS
    ]:
        problems.append(
            f"quantised (not {', '.join(SAFETENSORS)}); convert the checkpoint first: {_some(types)}"
        )
    # What is always float32 is so beside weights of any dtype.
    alike = {n: t for n, t in stored.items() if n not in mapping.float32}
    counts = Counter(t.dtype for t in alike.values())
    if one_dtype and not types and len(counts) > 1:
        ((usual, count),) = counts.most_common(1)
        others = [f"{n} is {t.dtype}" for n, t in alike.items() if t.dtype != usual]
        problems.append(f"not {usual}, as {count} tensors are; save it with one dtype: {_some(others)}")
    if problems:
        raise UserError(f"{folder}: the weights do not match its {described}\n  " + "\n  ".join(problems))


def _corrupt(file: Path, why: str) -> UserError:
    return UserError(f"{file}: truncated or corrupt: {one_line(why[:300])}; copy the file again")


def _some(items: Iterable[str]) -> str:
    """The first 40 items, and how many more there are."""
    listed = list(items)
    rest = f" and {len(listed) - 40} more" if len(listed) > 40 else ""
    return one_line(", ".join(shorten(item, 200) for item in listed[:40])) + rest
