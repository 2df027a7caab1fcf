"""Each pair of features is refused by name, or meets in a run.

Why: planted faults that no test found stood where two features meet. A feature that is added gets a row of
``tests/support/feature_pairs.py``, and its pairs are then missing here until each is in a run or refused.
The runs themselves: tests/integration/test_feature_pair_runs.py.
"""

from itertools import combinations
from pathlib import Path

import pytest

from rpg_megatron.config import UserError, load_settings, read_model_shape
from rpg_megatron.launcher.checks import LAYOUT, CheckedRun, run_checks
from tests.support.feature_pairs import (
    APART,
    FEATURES,
    REFUSED,
    RL,
    RUNS,
    SFT,
    TUNED,
    WARM_START,
    features_of,
    meetings,
    refusals,
    settings_of,
    table,
)
from tests.support.runs import QUICKSTART

DOCS = Path(__file__).parents[2] / "docs"


def test_each_pair_meets_in_a_run_or_is_refused() -> None:
    met = meetings()
    assert set(combinations(FEATURES, 2)) == met.keys() | REFUSED.keys() | APART.keys()
    assert not met.keys() & (REFUSED.keys() | APART.keys())


@pytest.mark.parametrize("name", [*RUNS, *TUNED])
def test_the_settings_of_a_run_pass_the_checks(name: str) -> None:
    settings = settings_of(name)
    run_checks(CheckedRun(settings, LAYOUT, known=read_model_shape(settings.model.path)))
    assert len(features_of(settings)) >= 3


@pytest.mark.parametrize("pair", REFUSED, ids=" and ".join)
def test_a_pair_is_refused_by_name(pair: tuple[str, str]) -> None:
    words, message = REFUSED[pair]
    with pytest.raises(UserError) as caught:
        check(*((WARM_START, [*SFT, *words]) if "fine-tuning" in pair else (QUICKSTART, [*RL, *words])))
    assert message in str(caught.value)


def check(file: Path, words: list[str]) -> None:
    settings = load_settings(file, words)
    run_checks(CheckedRun(settings, LAYOUT, known=read_model_shape(settings.model.path)))


def test_the_pages_have_the_tables() -> None:
    assert refusals() in (DOCS / "feature-pairs.md").read_text(encoding="utf-8")
    assert table() in (DOCS / "evidence" / "feature-pairs.md").read_text(encoding="utf-8")
