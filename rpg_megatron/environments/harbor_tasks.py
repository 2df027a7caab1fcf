"""Tasks in Harbor's format: folders with ``task.toml``, an instruction, tests and a solution.

Schema 1.4 of github.com/harbor-framework/harbor (``models/task/config.py``, ``models/task/paths.py``, 0.26),
for tasks of one step in one container. Each key is used, refused, or told as not used. Images are local:
``images`` says which file or folder is a task's.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError, create_model

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_regular, read_json, read_text

_NAME = "rpg_megatron.environments.harbor"
MAP = "images.json"
"""File in the folder of the tasks with their images, if none are given."""
_MEMORY, _STORAGE = 2048, 1024
"""MiB of a task that does not say."""

_REFUSED = {
    "steps": "tasks of several steps",
    "multi_step_reward_strategy": "tasks of several steps",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "services, and so health checks",
    "environment.gpus": "GPUs in a sandbox",
    "environment.tpu": "TPUs",
    "verifier.environment": "an image of the tests' own",
    "verifier.collect": "services of docker compose",
}
_NETWORK = "network_mode", "allowed_hosts"
_NOT_USED = (
    *("artifacts", "environment.cpus", "environment.skills_dir", "agent.user", "verifier.user"),
    *(f"{section}.{key}" for section in ("environment", "agent", "verifier") for key in _NETWORK),
)
"""Keys that are told as not used. Those that say nothing of how a task runs are not."""


def _table(*others: str, **fields: Any) -> Any:
    """A table of the file: keys with type and default, and keys of any type."""
    make: Any = create_model
    return make(
        "Table", __config__=ConfigDict(extra="forbid"), **dict.fromkeys(others, (Any, None)), **fields
    )


_Seconds, _Variables = Annotated[float, Field(gt=0)], dict[str, str]
_Solution = _table(env=(_Variables, {}))
_Agent = _table("user", *_NETWORK, timeout_sec=(_Seconds | None, None))
_Verifier = _table(
    *("user", "environment", "collect", *_NETWORK),
    timeout_sec=(_Seconds, 600.0),
    env=(_Variables, {}),
    environment_mode=(Literal["shared"] | None, None),
)
_Environment = _table(
    *(
        "cpus",
        "skills_dir",
        "build_timeout_sec",
        "gpus",
        "gpu_types",
        "tpu",
        "mcp_servers",
        "healthcheck",
        *_NETWORK,
    ),
    docker_image=(str | None, None),
    memory_mb=(Annotated[int, Field(ge=16)], _MEMORY),
    storage_mb=(Annotated[int, Field(ge=1)], _STORAGE),
    workdir=(Annotated[str, Field(pattern="^/")] | None, None),
    env=(_Variables, {}),
    os=(Literal["linux", "Linux"], "linux"),
)
_Config = _table(
    *("source", "artifacts", "steps", "multi_step_reward_strategy"),
    schema_version=(Annotated[str, Field(pattern=r"^1\.[0-4]$")], "1.4"),
    task=(dict[str, Any], {}),
    metadata=(dict[str, Any], {}),
    environment=(_Environment, _Environment()),
    agent=(_Agent, _Agent()),
    verifier=(_Verifier, _Verifier()),
    solution=(_Solution, _Solution()),
)


class HarborTask(NamedTuple):
    """A task and its image."""

    folder: Path
    image: str
    instruction: str
    memory_mib: int
    storage_mib: int
    seconds: float | None
    """For all commands of the policy, or of the solution."""
    test_seconds: float
    workdir: str
    """Empty: the image's."""
    built_workdir: str
    """Of its Dockerfile, if neither the task nor the image says one."""
    variables: dict[str, str]
    test_variables: dict[str, str]
    solution_variables: dict[str, str]
    not_used: tuple[str, ...]
    """Keys of its settings."""


def problems(
    *, folder: str, images: dict[str, str] | str | None = None, skip_unmapped: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of the tasks in a folder: a source of prompts.

    images: see ``find_tasks``. skip_unmapped: leave tasks without an image out. Raises UserError.
    """
    tasks, unmapped, refused = find_tasks(folder, images)
    if refused or (unmapped and not skip_unmapped):
        raise UserError(f"{_NAME}: {'; '.join(_listed(unmapped, refused))}")
    if not tasks:
        raise UserError(f"{_NAME}: no folder below {folder} has a task.toml and an image")
    return (
        {"prompt": t.instruction, "answer": t.folder.name, "task": str(t.folder), "image": t.image}
        for t in tasks
    )


def find_tasks(
    folder: str, images: dict[str, str] | str | None
) -> tuple[list[HarborTask], list[str], dict[str, str]]:
    """The tasks in a folder or one task, the names of those without an image, and why others are refused.

    images: a file or folder (``images.py``) by the name of the task's folder, by ``task.name`` or by
    ``environment.docker_image``; a path names a JSON file with it, by default ``MAP`` in the folder. Paths in
    that are relative to it. Raises UserError.
    """
    root = Path(folder).absolute()
    if images is None and (root / MAP).is_file():
        images = str(root / MAP)
    if isinstance(images, str):
        file = Path(images).absolute()
        try:
            given = read_json(file)
            images = {str(name): str(file.parent / path) for name, path in given.items()}
        except (OSError, ValueError, AttributeError, TypeError) as e:
            raise UserError(f"{images} is no JSON object with paths of images: {e}") from None
    places = [root] if (root / "task.toml").is_file() else sorted(p.parent for p in root.glob("*/task.toml"))
    tasks, unmapped, refused = [], [], dict[str, str]()
    for place in places:
        try:
            config = _config_of(place)
            names = place.name, str(config.task.get("name")), config.environment.docker_image
            image = next((images[name] for name in names if name in images), None) if images else None
            if image is None:
                unmapped.append(f"{place.name} ({config.environment.docker_image or 'a Dockerfile'})")
            else:
                tasks.append(read_task(str(place), image))
        except UserError as e:
            refused[place.name] = str(e)
    return tasks, unmapped, refused


def node_note(episode: Mapping[str, Any], source: Mapping[str, Any], at_once: int) -> str:
    """What a node needs for the episodes of ``harbor.py``, as a note.

    episode, source: their settings, with ``type``; at_once: most episodes at the same time. Empty: others.
    """
    if episode.get("type") != "rpg_megatron.environments.harbor:play":
        return ""
    most, which = _MEMORY + _STORAGE, "the default of a task"
    if source.get("type") == "rpg_megatron.environments.harbor:problems":
        with suppress(UserError):  # it is told where tasks are read
            tasks, *_ = find_tasks(str(source.get("folder")), source.get("images"))
            most = max((t.memory_mib + t.storage_mib for t in tasks), default=most)
            which = f"the largest of {len(tasks)} tasks" if tasks else which
    total = f"{at_once:,} episodes at once x {most:,} MiB ({which}: memory_mb + storage_mb)"
    disk = f"{episode.get('cache_gib', 100.0):g} GiB of disk (cache_gib), and an image while it is unpacked"
    total += f" = {at_once * most / 1024:,.0f} GiB"
    return f"episodes in images need on rank 0's node: memory, at their limits {total}; {disk}"


def _listed(unmapped: list[str], refused: Mapping[str, str]) -> list[str]:
    listed = list(refused.values())
    if unmapped:
        what = f"{len(unmapped)} tasks have no image here: {', '.join(unmapped)}"
        listed.append(
            f"{what}; name one in images, by task or docker_image, since none is built or downloaded"
        )
    return listed


@lru_cache(1024)
def read_task(folder: str, image: str) -> HarborTask:
    """A task. Raises UserError: what is refused, where, and what to do."""
    place = Path(folder)
    config = _config_of(place)
    given = [key for key in _NOT_USED if _value(config, key, given=True) not in (None, "no-network")]
    environment, docker = config.environment, ""
    try:
        instruction = read_text(place / "instruction.md")
        if (place / "environment/Dockerfile").is_file():
            docker = read_text(place / "environment/Dockerfile")
        open_regular(place / "tests/test.sh").close()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{place}: {e}; a task has instruction.md and tests/test.sh") from None
    workdir = "/"
    for said in re.findall(r"^\s*WORKDIR\s+(\S+)", docker, re.MULTILINE | re.IGNORECASE):
        workdir = posixpath.join(workdir, said.strip("\"'"))
    if "$" in workdir:  # a variable of the build: the image says what it is
        workdir = "/"
    return HarborTask(
        place,
        image,
        instruction,
        environment.memory_mb,
        environment.storage_mb,
        config.agent.timeout_sec,
        config.verifier.timeout_sec,
        environment.workdir or "",
        workdir,
        environment.env,
        config.verifier.env,
        config.solution.env,
        tuple(given),
    )


def _config_of(place: Path) -> Any:
    file = place / "task.toml"
    try:
        values = tomllib.loads(read_text(file))
        config = _Config(**_with_new_names(values))
    except (OSError, ValueError, RecursionError) as e:
        said = str(e)
        if isinstance(e, ValidationError):
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in e.errors()[:5])
        raise UserError(f"{file}: {said}; see Harbor's schema 1.4") from None
    for key, what in _REFUSED.items():
        if _value(config, key):
            raise UserError(f"{file}: {key}: {what} are not supported; leave this task out")
    for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml"):
        if (place / "environment" / name).exists():
            raise UserError(
                f"{place}/environment/{name}: docker compose is not supported; leave this task out"
            )
    if (place / "trajectory.json").exists():
        raise UserError(f"{place}/trajectory.json: earlier turns are not supported; leave this task out")
    for section in (config.environment, config.verifier, config.solution):
        if templates := [name for name, value in section.env.items() if "${" in value]:
            raise UserError(
                f"{file}: env.{templates[0]} is a template of this machine's variables; write its value"
            )
    return config


def _value(config: Any, key: str, given: bool = False) -> Any:
    """The value of a key. given: None unless the file has it."""
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    return getattr(section, name) if not given or name in section.model_fields_set else None


def _with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with the names of schema 1.4. Raises ValueError."""
    if "version" in values:
        values.setdefault("schema_version", values.pop("version"))
    verifier = values.get("verifier")
    for section in (
        values.get("environment"),
        verifier.get("environment") if isinstance(verifier, dict) else None,
    ):
        if not isinstance(section, dict):
            continue
        for old in ("memory", "storage"):
            if old in section:
                size = _mebibytes(section.pop(old))
                if section.setdefault(f"{old}_mb", size) != size:
                    raise ValueError(f"environment.{old} and environment.{old}_mb differ")
        if (allowed := section.pop("allow_internet", None)) is not None:
            section.setdefault("network_mode", "public" if allowed else "no-network")
    return values


def _mebibytes(size: Any) -> int:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([GMK])\s*", str(size), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{size!r} is no size such as 512M or 1G")
    return int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2].upper()])
