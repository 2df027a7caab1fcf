"""Single rows of the table of checks, as ``doctor`` shows them."""

from __future__ import annotations

from contextlib import suppress

from rpg_megatron.commands.doctor.probe import Check, Subject
from rpg_megatron.commands.doctor.run_inputs import probe_check
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.launcher.checks import CHECKS


def doctor_rows(settings: Settings, *names: str) -> list[Check]:
    """The rows of these checks."""
    shape = None
    with suppress(UserError):
        shape = read_model_shape(settings.model.path)
    assert set(names) <= {check.name for check in CHECKS}
    subject = Subject(settings, shape)
    return [row for check in CHECKS if check.name in names for row in probe_check(check, subject)]
