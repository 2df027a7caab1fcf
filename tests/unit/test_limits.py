"""Limits of the shell that are too low for a run are reported before anything starts.

Why: with too few open files or too little address space, a run ends in the traceback of a library after it
has loaded the model. Not covered: whether the numbers suffice for large runs; real limits of a real launcher
are in tests/integration/test_launcher.py.
"""

import resource
from pathlib import Path

import pytest

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.launcher.checks import CheckedRun, check_start
from rpg_megatron.system.limits import check_address_space, check_files, explain_limits
from tests.support.checks import doctor_rows

NONE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """The process's apparent limits; a limit that is not set is unlimited."""
    values: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: values.get(limit, (NONE, NONE)))
    monkeypatch.setattr(resource, "setrlimit", values.__setitem__)
    return values


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [
        (96, 100_000, 65536),
        (96, NONE, 65536),
        (96, 2000, 2000),
        (70_000, 100_000, 70_000),
        (NONE, NONE, NONE),
    ],
)
def test_the_soft_limit_of_open_files_is_raised(
    limits: dict[int, tuple[int, int]], soft: int, hard: int, after: int
) -> None:
    limits[resource.RLIMIT_NOFILE] = soft, hard
    assert check_files(2, 512) == []
    assert limits[resource.RLIMIT_NOFILE] == (after, hard)


def test_a_low_hard_limit_is_a_warning_or_an_error(limits: dict[int, tuple[int, int]]) -> None:
    limits[resource.RLIMIT_NOFILE] = 96, 400
    message = "open files are limited to 400, up to 1024 are needed; raise the hard limit"
    assert [text.startswith(message) for text in check_files(2, 512)] == [True]
    for ranks, hard in ((2, 96), (64, 400)):
        limits[resource.RLIMIT_NOFILE] = 96, hard
        with pytest.raises(
            UserError, match=f"open files are limited to {hard}, up to .*; raise the hard limit"
        ):
            check_files(ranks, 512)


def test_little_address_space_is_refused_before_all_else(
    limits: dict[int, tuple[int, int]], config_file: Path
) -> None:
    settings = load_settings(config_file)  # its model does not exist
    limits[resource.RLIMIT_AS] = 3 * 1024**3, NONE
    message = r"limited to 3\.0 GiB, ranks and engines need 6 GiB or more; run ulimit -v unlimited"
    with pytest.raises(UserError, match=message):
        check_start(CheckedRun(settings))
    limits[resource.RLIMIT_AS] = 100 * 1024**3, NONE
    check_address_space()


def test_doctor_has_a_row_for_each_limit(limits: dict[int, tuple[int, int]], config_file: Path) -> None:
    def rows() -> list[tuple[str, str]]:
        settings = load_settings(config_file, ["engine.max_sequences=512"])
        return [(row.name, row.verdict) for row in doctor_rows(settings, "open files", "address space")]

    assert rows() == [("address space", "ok"), ("open files", "ok")]
    limits[resource.RLIMIT_NOFILE] = 96, 400
    limits[resource.RLIMIT_AS] = 3 * 1024**3, 3 * 1024**3
    assert rows() == [("address space", "failed"), ("open files", "warning")]
    limits[resource.RLIMIT_NOFILE] = 96, 96
    assert rows()[1] == ("open files", "failed")


@pytest.mark.parametrize(
    ("log", "limit", "message"),
    [
        ("MemoryError", resource.RLIMIT_AS, "ulimit -v is 4"),
        (
            "terminate called after 'std::bad_alloc'",
            resource.RLIMIT_AS,
            "ulimit -v is 4",
        ),
        ("OSError: [Errno 24] Too many open files", resource.RLIMIT_NOFILE, "ulimit -n is 4096"),
        ("RuntimeError: can't start new thread", resource.RLIMIT_NPROC, "ulimit -u is 4096"),
    ],
)
def test_the_limit_that_a_log_speaks_of_is_named(
    limits: dict[int, tuple[int, int]], log: str, limit: int, message: str
) -> None:
    assert explain_limits(log) == "", "there is no limit"
    limits[limit] = 4096, 4096
    assert message in explain_limits(log)
    assert explain_limits("ValueError") == ""
