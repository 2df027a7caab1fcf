"""Seconds and memory until the first prompts of a large data set can be sent, without and with its cache.

    python -m benchmarks.prompts [--rows 100000 1000000] [--forms jsonl parquet] [--chat]

Prompts have about 150 tokens of a byte-level BPE as Qwen's. For each row of the table two processes are
measured. ``check``: the launcher's check of the data. ``first``: the sampler's steps from its start until the
prompts of the first 64 tasks are ready to be sent; ``all``: until all have been tokenized in the background,
which the end of the first step's sampling waits for. Each begins without ``.rpg_cache`` (cache no), or with
what a run before has kept (yes). MiB: the largest resident size of the process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = """the a number of apples and pears that Anna has in three boxes if every box holds at least twelve
more than before how many are left after she gives away half find all integers such that x squared plus y
equals zero prove triangle angle sum function polynomial root prime divides modulo""".split()  # noqa: SIM905


def main() -> None:
    """Print a line for each number of rows, form, and state of the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--forms", nargs="+", default=["jsonl"], choices=["jsonl", "parquet"])
    parser.add_argument("--chat", action="store_true", help="render the prompts with a chat template")
    parser.add_argument("--folder", type=Path, help="for the data; default: a temporary one")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as temporary:
        folder = Path(temporary)
        write_tokenizer(folder / "model")
        print("     rows  form     cache check s    MiB first s  CPU s   all s    MiB")
        for rows in a.rows:
            for form in a.forms:
                file = write_data(folder, rows, form)
                for cache in ("no", "yes"):
                    found = {}
                    for what in ("check", "sample"):
                        if cache == "no":
                            shutil.rmtree(folder / ".rpg_cache", ignore_errors=True)
                        found[what] = measure(what, file, chat=a.chat)
                    check, first = found["check"], found["sample"]
                    print(
                        f"{rows:9,}  {form:8} {cache:5} {check['first']:7.1f} {check['mib']:6.0f} "
                        f"{first['first']:7.1f} {first['cpu']:6.1f} {first['all']:7.1f} {first['mib']:6.0f}",
                        flush=True,
                    )
                file.unlink()


def measure(what: str, file: Path, *, chat: bool) -> dict[str, float]:
    """Run a step in a process of its own."""
    command = [sys.executable, "-c", f"from benchmarks import prompts; prompts.{what}({str(file)!r}, {chat})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(file: str, chat: bool) -> None:
    """The launcher's check of the data."""
    began = time.monotonic()
    from rpg_megatron.config.data import DataSettings
    from rpg_megatron.data.problems import read_problems_with_counts
    from rpg_megatron.launcher.input_checks import check_prompts

    data = DataSettings(path=Path(file), chat=chat)
    problems, *_ = read_problems_with_counts(data)
    check_prompts(problems, data, Path(file).parent / "model", "data", ())
    tell(time.monotonic() - began)


def sample(file: str, chat: bool) -> None:
    """The sampler's start, until the prompts of its first step are ready to be sent."""
    began = time.monotonic()
    from rpg_megatron.config.data import DataSettings
    from rpg_megatron.data.prompt_stream import PromptStream
    from rpg_megatron.data.prompts import load_tokenizer, without_torch
    from rpg_megatron.data.stored_prompts import open_prompts

    with without_torch():
        tokenizer = load_tokenizer(Path(file).parent / "model")
    stream = PromptStream(open_prompts(DataSettings(path=Path(file), chat=chat), tokenizer), seed=1)
    taken = stream.take(64)
    assert len(taken) == 64
    first, cpu = time.monotonic() - began, time.process_time()
    stream.state()
    tell(first, cpu, time.monotonic() - began)


def tell(first: float, cpu: float = 0.0, whole: float = 0.0) -> None:
    """Print a measurement."""
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"first": first, "cpu": cpu, "all": whole, "mib": mib}))


def write_data(folder: Path, rows: int, form: str) -> Path:
    """A file of random problems."""
    rng, file = random.Random(0), folder / f"{rows}.{form}"
    lines = (
        {"prompt": f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randrange(110, 180))), "answer": str(i)}
        for i in range(rows)
    )
    if form == "jsonl":
        with file.open("w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(list(lines)), file, row_group_size=10_000)
    return file


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE in the form of Qwen's, with its chat template."""
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
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))


if __name__ == "__main__":
    main()
