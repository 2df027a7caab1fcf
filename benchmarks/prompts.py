"""Seconds and memory until the first prompts of a large data set can be sent, without and with its cache."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.setup import Report, benchmark, main

WORDS = """the a number of apples and pears that Anna has in three boxes if every box holds at least twelve
more than before how many are left after she gives away half find all integers such that x squared plus y
equals zero prove triangle angle sum function polynomial root prime divides modulo""".split()  # noqa: SIM905


@benchmark(rows=(20_000,))
def prompts(
    report: Report,
    rows: tuple[int, ...] = (100_000, 1_000_000),
    folder: Path | None = None,
) -> None:
    """The launcher's check of the data and the sampler's start, each in a process of its own.

    JSON lines of prompts of about 150 tokens, with a byte-level BPE like Qwen's. folder: for the data. First:
    from the sampler's start until the prompts of the first 64 tasks are ready to be sent; all: until all have
    been tokenized in the background, which the end of the first step's sampling waits for. Each begins
    without ``.rpg_cache`` (cache: no), or with that of an earlier run (yes). MiB: the peak resident size of
    the process.
    """
    columns = ("rows|,", "cache", "check, s|.1f", "MiB|.0f", "first, s|.1f", "CPU, s|.1f", "all, s|.1f")
    table = report.table(*columns, "MiB|.0f")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        write_tokenizer(place / "model")
        for count in rows:
            file = write_data(place, count)
            for cache in ("no", "yes"):
                cells = []
                for function in ("check", "sample"):
                    if cache == "no":
                        shutil.rmtree(place / ".rpg_cache", ignore_errors=True)
                    code = f"from benchmarks import prompts; prompts.{function}({str(file)!r})"
                    command = [sys.executable, "-c", code]
                    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    cells += json.loads(process.stdout.splitlines()[-1])
                table.row(count, cache, *cells)


def check(file: str) -> None:
    """The launcher's check of the data."""
    start = time.monotonic()
    from rpg_megatron.config.data import DataSettings
    from rpg_megatron.data.problems import read_problems_with_counts
    from rpg_megatron.launcher.input_checks import check_prompts

    data = DataSettings(path=Path(file))
    problems, *_ = read_problems_with_counts(data)
    check_prompts(problems, data, Path(file).parent / "model", "data", ())
    _print_figures(time.monotonic() - start)


def sample(file: str) -> None:
    """The sampler's start, until the prompts of its first step are ready to be sent."""
    start = time.monotonic()
    from rpg_megatron.config.data import DataSettings
    from rpg_megatron.data.prompt_stream import PromptStream
    from rpg_megatron.data.prompts import load_tokenizer, without_torch
    from rpg_megatron.data.stored_prompts import open_prompts

    with without_torch():
        tokenizer = load_tokenizer(Path(file).parent / "model")
    stream = PromptStream(open_prompts(DataSettings(path=Path(file)), tokenizer), seed=1)
    tasks = stream.take(64)
    assert len(tasks) == 64
    first, cpu = time.monotonic() - start, time.process_time()
    stream.state()
    _print_figures(first, cpu, time.monotonic() - start)


def _print_figures(*figures: float) -> None:
    print(json.dumps([*figures, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def write_data(folder: Path, rows: int) -> Path:
    """A file of random problems."""
    rng, file = random.Random(0), folder / f"{rows}.jsonl"
    with file.open("w") as out:
        for i in range(rows):
            prompt = f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randrange(110, 180)))
            out.write(json.dumps({"prompt": prompt, "answer": str(i)}) + "\n")
    return file


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE in the form of Qwen's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=5000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(__doc__, prompts)
