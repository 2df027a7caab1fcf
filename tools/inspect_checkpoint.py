"""What a checkpoint holds, and whether it is whole: ``rpg-megatron convert inspect``."""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the package beside this script, installed or not

from rpg_megatron.cli import main

if __name__ == "__main__":
    main(["convert", "inspect", *sys.argv[1:]])
