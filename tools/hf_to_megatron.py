"""Hugging Face checkpoint -> Megatron-Core checkpoint: ``rpg-megatron convert hf-to-megatron``."""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the package beside this script, installed or not

from rpg_megatron.cli import main

if __name__ == "__main__":
    main(["convert", "hf-to-megatron", *sys.argv[1:]])
