"""docs/settings.md is what the settings say.

Why: a reference that is written by hand is wrong after the next setting. Not covered: whether a meaning is
true.
"""

from pathlib import Path

from rpg_megatron.config import Settings
from rpg_megatron.config.explanation import valid_keys
from tools.settings_page import page

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_that_of_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tools.settings_page > docs/settings.md"


def test_every_setting_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = {name for name in Settings.model_fields if f"\n## {name}\n" in text}
    assert {key for key in valid_keys(Settings) if f"| `{key}`" not in text} == sections
