"""The limits of this process that its children inherit, such as those of open files and of address space."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping

from rpg_megatron.config.errors import UserError

_LEAST_FILES, _FILES_PER_RANK = 256, 8
"""Open files that a run needs for certain: measured were 230 for an engine's server, 140 for one of two ranks
and 12 more for each further rank, 217 for a sampler with few requests."""
_SPARE_FILES = 512
"""Open files of a process besides one per request: libraries, sockets, logs."""
_MOST_FILES = 65536
"""The soft limit is raised up to here: with a larger one, some programs walk through millions of numbers."""
_LEAST_ADDRESSES = 6 * 1024**3
"""Address space that a rank needs for certain: 6.2 GiB were measured with a tiny model, 5.3 for an engine."""
_SIGNS = (
    (resource.RLIMIT_AS, "MemoryError|Cannot allocate memory|bad_alloc|failed to map segment", "-v", 1024),
    (resource.RLIMIT_NOFILE, "Too many open files", "-n", 1),
    (resource.RLIMIT_NPROC, "can't start new thread|pthread_create failed", "-u", 1),
)
"""Limit, what a process says that reached it, its option of ulimit, and that option's unit."""


def check_address_space() -> None:
    """Raise UserError if the limit of the address space is too low for any run."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _LEAST_ADDRESSES:
        raise UserError(
            f"the address space of a process is limited to {space / 1024**3:.1f} GiB, ranks and engines need "
            f"{_LEAST_ADDRESSES / 1024**3:.0f} GiB or more; run ulimit -v unlimited before the command"
        )


def check_files(ranks: int, requests: int) -> list[str]:
    """Raise the soft limit of open files; returns a warning if it may be too low.

    ranks: trainer ranks on all nodes. requests: maximum of concurrent requests to the engines.
    Raises UserError if the hard limit is too low for any run of that size.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in limits)
    most = min(hard, _MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        soft = most
    least = _LEAST_FILES + _FILES_PER_RANK * ranks
    needed = max(least, _SPARE_FILES + requests)
    problem = (
        f"open files are limited to {soft}, up to {needed} are needed; raise the hard limit (ulimit -Hn) in "
        "limits.conf, or Slurm's PropagateResourceLimits"
    )
    if soft < least:
        raise UserError(problem)
    return [problem] if soft < needed else []


def lower_limits(most: Mapping[int, int]) -> None:
    """Set soft and hard limits, ``resource.RLIMIT_...`` -> value, for good; hard ones below that stay."""
    for kind, limit in most.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def explain_limits(text: str) -> str:
    """A line on the limit that a process seems to have reached, by the end of its log; else empty."""
    for limit, sign, option, unit in _SIGNS:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and re.search(sign, text):
            return f"\na limit of the shell may be the cause: ulimit {option} is {soft // unit}; raise it"
    return ""
