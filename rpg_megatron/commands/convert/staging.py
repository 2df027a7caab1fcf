"""What a conversion reads; the staging folder that it writes to, and its progress."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rpg_megatron.config import ModelShape, UserError
from rpg_megatron.config.files import make_private, remove, rename, sync_folder
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.run_dir import LOCK, hold_folder
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.dtypes import ITEM_BYTES


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert, whose headers and sizes were checked."""

    shape: ModelShape
    layout: ModelMapping
    """Of the weights in the result."""
    dtype: str
    """Dtype of the weights; empty if only Megatron's index has it."""
    config: Path
    """Folder with config.json and tokenizer and, for adapters, the weights that they are added to."""
    root: Path
    """The folder that the user has named for them: no link of theirs may leave it."""
    folder: Path
    """Folder of the weights."""
    whole: Path
    """Folder of the checkpoint, which the names in ``files`` are relative to."""
    files: dict[str, dict[str, Any]]
    """Files to compare with the manifest: name -> bytes, sha256. Empty without a manifest."""
    lora: LoraSettings | None = None
    """Of a LoRA run's checkpoint, which has adapters and no other weights."""
    ends: list[int] = field(default_factory=list)
    """Of a run with chats: the tokens that end a response (``chat_ends``)."""
    note: str = ""
    """About tensors that are not converted."""

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return self.layout.parameters * ITEM_BYTES[self.dtype or "float32"]

    def __str__(self) -> str:
        """One line: the model, and where the model's configuration is if that is another folder."""
        elsewhere = not self.config.absolute().is_relative_to(self.whole.absolute())
        read = "weights, config.json" if self.lora is not None else "config.json"
        return (
            f"{self.shape.family}, {self.shape.num_layers} layers, {self.layout.parameters:,} parameters"
            f"{', ' + self.dtype if self.dtype else ''}"
            f"{f'; {read} and tokenizer of {self.config}' if elsewhere else ''}"
            f"{f'; adapters of rank {self.lora.rank}' if self.lora is not None else ''}"
            f"{f'; {self.note}' if self.note else ''}"
        )


class Staging:
    """``.NAME.incomplete`` beside the target folder: empty on entry, removed on exit in any case.

    ``keep`` first moves the result to its place. A killed conversion leaves it behind, and the next one of
    the same name removes it; a lock in it shows whether a conversion is still running. Signals are only noted
    within the context, and raise Interrupted from ``count``: raised anywhere, they would leave locks held. An
    OSError that leaves the context becomes a UserError.
    """

    def __init__(self, out: Path, needed: int, signals: StopSignals) -> None:
        """out: the target folder. needed: bytes of the result."""
        self.out, self._needed, self.signals = out, needed, signals
        self._out, self.began = out.absolute(), time.monotonic()
        self.work = self._out.parent / f".{self._out.name}.incomplete"
        self.result = self.work / "result"
        self._lock: IO[str] | None = None
        self._counting = threading.Lock()

    def __enter__(self) -> Staging:
        if self._out.exists() or self._out.is_symlink():
            raise UserError(f"{self._out}: already exists; choose another folder or remove it")
        self.signals.raising = False
        try:
            self.work.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.work)
            self._lock = hold_folder(self.work)
            if self._lock is None:
                raise UserError(
                    f"{self._out}: another conversion is writing it; wait or choose another folder"
                )
            for entry in self.work.iterdir():
                if entry.name != LOCK:
                    remove(entry)
            free = shutil.disk_usage(self.work).free
        except OSError as e:
            raise UserError(f"{self.work}: {e.strerror or e}; choose a writable folder") from None
        console = PlainTextConsole(stderr=True)
        self._progress = Progress(None, steps=0, console=console, line_seconds=10.0)
        if free < self._needed:
            self.__exit__(None, None, None)
            sizes = f"{free / 1e9:.1f} GB free, the checkpoint needs {self._needed / 1e9:.1f} GB"
            raise UserError(f"{self._out.parent}: {sizes}")
        return self

    def begin(self, name: str, total: int = 0) -> None:
        """Begin a phase of ``total`` bytes; 0 if unknown."""
        self._name = f"{name} {total / 1e6:,.1f} MB" if total else name
        self._done, self._total = 0, total
        self.count(0)

    def count(self, size: int) -> None:
        """Add bytes to those done in this phase. Any thread may call it. Raises Interrupted."""
        with self._counting:
            self.signals.check()
            self._done += size
            percent = min(100, 100 * self._done // max(1, self._total))
            self._progress.show_phase(self._name, percent, 100 if self._total else 0)
            self._progress.pump(0)

    def keep(self) -> None:
        """Move the complete result to its place. Raises OSError."""
        rename(self.result, self._out)
        sync_folder(self._out.parent)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._progress.close()
        remove(self.work, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if isinstance(error, OSError):
            raise UserError(f"{self._out}: not written ({error.strerror or error})") from None
