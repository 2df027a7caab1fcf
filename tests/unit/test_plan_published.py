"""What ``plan`` says of NeMo-RL's published steps is what docs/evidence/plan.md says.

Why: a change to a formula or to a default must show what it does to the only steps of this size that anybody
has published with lengths, layout and seconds. Not covered: phases, which the page does not have, and memory.
"""

import re

import pytest

from rpg_megatron.commands.plan.gpus import assume
from tests.support.published_steps import ROWS, Published, fit, predict
from tests.support.recipes import EXAMPLES


def documented() -> dict[str, list[str]]:
    """Row -> its last five cells: published, predicted, ratio, fitted on the others, ratio with that."""
    page = (EXAMPLES.parent / "docs" / "evidence" / "plan.md").read_text()
    lines = re.findall(
        r"^\| (.+?) \|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M
    )
    return {name: cells for name, *cells in lines}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table_of_published_steps_is_plans(row: Published) -> None:
    step, others = predict(row).step, fit([other for other in ROWS if other is not row])
    held_out = predict(row, f"decode_efficiency={others}").step / row.seconds
    assert documented()[row.name] == [
        f"{row.seconds:g}",
        f"{step:.0f}",
        f"{step / row.seconds:.2f}",
        f"{others:.2f}",
        f"{held_out:.2f}",
    ]
    assert abs(held_out - 1) < 0.25


def test_the_default_is_the_fit_of_all() -> None:
    assert assume("h100-80").decode_efficiency == fit(ROWS)
    near = [abs(float(cells[-1]) - 1) < 0.15 for cells in documented().values()]
    assert sum(near) >= 6
