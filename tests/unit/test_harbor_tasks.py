"""Tasks in Harbor's format: what is read of task.toml, what is refused, and what is told.

Why: a key that is left out in silence changes a task. Keys are those of the models of harbor 0.26.0 (schema
1.4), listed here; each is used, refused, told as not used, or says nothing of how a task runs. Not covered:
programs of tasks (test_env_check).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.environments import harbor_tasks
from rpg_megatron.environments.harbor_tasks import find_tasks, problems, read_task
from rpg_megatron.launcher.checks import needs_of_images
from tests.support.harbor_tasks import CONFIG, write_task

HARBOR = {
    "_Config": "schema_version task metadata verifier agent environment solution source "
    "multi_step_reward_strategy steps artifacts",
    "_Environment": "network_mode allowed_hosts build_timeout_sec docker_image os cpus memory_mb storage_mb "
    "gpus gpu_types tpu mcp_servers env skills_dir healthcheck workdir",
    "_Agent": "network_mode allowed_hosts timeout_sec user",
    "_Verifier": "network_mode allowed_hosts timeout_sec env user environment_mode environment collect",
    "_Solution": "env",
}
"""Fields of TaskConfig, EnvironmentConfig (without allow_internet), AgentConfig, ..."""
USED = {
    "schema_version", "environment.docker_image", "environment.memory_mb", "environment.storage_mb",
    "environment.workdir", "environment.env", "environment.os", "agent.timeout_sec", "verifier.timeout_sec",
    "verifier.env", "verifier.environment_mode", "solution.env",
}  # fmt: skip
SAY_NOTHING = {"task", "metadata", "source", "environment.build_timeout_sec", "environment.gpu_types"}
"""Of a task's run: who wrote it, and what belongs to a key that is refused or to a build."""


def test_each_key_of_harbor_is_used_refused_or_told() -> None:
    known = {name: set(getattr(harbor_tasks, name).model_fields) for name in HARBOR}
    assert known == {name: set(fields.split()) for name, fields in HARBOR.items()}
    sections = {"_Config": "", "_Environment": "environment.", "_Agent": "agent.", "_Verifier": "verifier."}
    keys = {f"{sections[name]}{field}" for name in sections for field in known[name]} | {"solution.env"}
    keys -= {"environment", "agent", "verifier", "solution"}
    groups = [USED, SAY_NOTHING, set(harbor_tasks._REFUSED), set(harbor_tasks._NOT_USED)]
    assert set().union(*groups) == keys
    assert sum(map(len, groups)) == len(keys)


def task_with(tmp_path: Path, text: str, **files: str) -> str:
    place = write_task(tmp_path, "a", condition="true", solve="true")
    (place / "task.toml").write_text(text)
    for name, content in files.items():
        file = place / name.replace("__", "/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    read_task.cache_clear()
    return str(place)


def test_what_is_read(tmp_path: Path) -> None:
    text = """
    version = "1.0"
    [environment]
    memory = "2G"
    storage = "512M"
    allow_internet = true
    cpus = 2
    env = {A = "b"}
    [agent]
    timeout_sec = 100.0
    [verifier]
    timeout_sec = 50
    env = {C = "d"}
    [solution]
    env = {E = "f"}
    """
    place = task_with(tmp_path, text)
    task = read_task(place, "i.sif")
    assert (task.memory_mib, task.storage_mib, task.seconds, task.test_seconds) == (2048, 512, 100, 50)
    assert (task.variables, task.test_variables, task.solution_variables) == (
        {"A": "b"},
        {"C": "d"},
        {"E": "f"},
    )
    assert (task.image, task.instruction, task.workdir) == ("i.sif", "Do it.", "")
    assert task.not_used == ("environment.cpus", "environment.network_mode")


@pytest.mark.parametrize(
    ("config", "docker", "workdirs"),
    [
        ("", "", ("", "/")),
        ("", "FROM a\nWORKDIR /a\nRUN x\nworkdir b\n", ("", "/a/b")),
        ("", "FROM a\nWORKDIR $HOME\n", ("", "/")),
        ('[environment]\nworkdir = "/c"', "FROM a\nWORKDIR /a\n", ("/c", "/a")),
    ],
)
def test_where_programs_start(tmp_path: Path, config: str, docker: str, workdirs: tuple[str, str]) -> None:
    place = task_with(tmp_path, config, **{"environment__Dockerfile": docker})
    task = read_task(place, "i")
    assert (task.workdir, task.built_workdir) == workdirs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[steps]]\nname = 'a'", "steps: tasks of several steps are not supported"),
        ("[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers: MCP servers are not supported"),
        ("[environment]\ngpus = 1", "GPUs in a sandbox"),
        ("[environment.healthcheck]\ncommand = 'a'", "health checks"),
        ("[environment]\nos = 'windows'", "environment.os: Input should be"),
        ("[verifier]\nenvironment_mode = 'separate'", "environment_mode: Input should be 'shared'"),
        ("[verifier.environment]\ncpus = 1", "an image of the tests' own"),
        ("[[verifier.collect]]\ncommand = 'a'", "docker compose"),
        ("[environment]\nmemory = 'x'", "'x' is no size such as 512M"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "memory and environment.memory_mb differ"),
        ("[environment]\nmemory_mb = -5", "environment.memory_mb: Input should be greater"),
        ("[environment]\nmemry = 5", "environment.memry: Extra inputs are not permitted"),
        ("unknown = 5", "unknown: Extra inputs"),
        ("schema_version = '2.0'", "schema_version: String should match"),
        ("[environment.env]\nKEY = '${KEY}'", "env.KEY is a template of this machine's variables"),
        ("[environment", "see Harbor's schema 1.4"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", "\\(").replace("$", "\\$").replace("{", "\\{")):
        read_task(task_with(tmp_path, text), "i.sif")


def test_compose_and_earlier_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="docker compose is not supported"):
        read_task(task_with(tmp_path, "", **{"environment__docker-compose.yaml": "a"}), "i.sif")
    (tmp_path / "a/environment/docker-compose.yaml").unlink()
    with pytest.raises(UserError, match="earlier turns are not supported"):
        read_task(task_with(tmp_path, "", **{"trajectory.json": "{}"}), "i.sif")
    (tmp_path / "a/trajectory.json").unlink()
    (tmp_path / "a/tests/test.sh").unlink()
    with pytest.raises(UserError, match=r"tests/test.sh"):
        read_task(str(tmp_path / "a"), "i.sif")


def test_images_by_task_name_and_docker_image(tmp_path: Path) -> None:
    for name, image in (("a", "x:1"), ("b", "x:1"), ("c", "y:1"), ("d", "z:1")):
        write_task(tmp_path, name, condition="true", solve="true", image=image, config=CONFIG)
    images = {"a": "of-a.sif", "x:1": "of-x.sif", "rpg/c": "of-c.sif"}
    tasks, unmapped, refused = find_tasks(str(tmp_path), images)
    assert {task.folder.name: task.image for task in tasks} == {
        "a": "of-a.sif",
        "b": "of-x.sif",
        "c": "of-c.sif",
    }
    assert (unmapped, refused) == (["d (z:1)"], {})
    with pytest.raises(UserError, match=r"1 tasks have no image here: d \(z:1\); name one in images"):
        problems(folder=str(tmp_path), images=images)
    rows = list(problems(folder=str(tmp_path), images=images, skip_unmapped=True))
    assert rows[0] == {"prompt": "Do it.", "answer": "a", "task": str(tmp_path / "a"), "image": "of-a.sif"}
    (tmp_path / "images.json").write_text(json.dumps(images | {"z:1": "/images/z.sif"}))
    assert [row["image"] for row in problems(folder=str(tmp_path))] == [
        str(tmp_path / "of-a.sif"), str(tmp_path / "of-x.sif"), str(tmp_path / "of-c.sif"), "/images/z.sif"
    ]  # fmt: skip
    (tmp_path / "images.json").write_text("[]")
    with pytest.raises(UserError, match="no JSON object with paths of images"):
        problems(folder=str(tmp_path))


def test_a_folder_without_tasks_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has a task.toml and an image"):
        problems(folder=str(tmp_path), images={})


def test_what_a_node_needs_is_a_note_of_its_plan(tmp_path: Path, config_file: Path) -> None:
    """Of the largest task; other episodes have no note."""
    for name, memory in (("a", "512"), ("b", "3072")):
        config = CONFIG.replace("memory_mb = 256", f"memory_mb = {memory}")
        write_task(tmp_path / "tasks", name, condition="true", solve="true", config=config)
    (tmp_path / "tasks/images.json").write_text('{"shell": "image"}')
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "ahead": 1}
    settings = [f"rollout.{name}={value}" for name, value in rollout.items()]
    settings += ["correction.type=truncate", "data.path=null"]
    place = f"folder: {tmp_path / 'tasks'}"
    settings += [f"data.source={{type: 'rpg_megatron.environments.harbor:problems', {place}}}"]

    def notes(episode: str) -> str:
        run = load_settings(config_file, [*settings, f"rollout.episode={{type: {episode}}}"])
        return " ".join(needs_of_images(run))

    said = notes("rpg_megatron.environments.harbor:play, cache_gib: 7")
    assert "16 episodes at once x 3,088 MiB (the largest of 2 tasks: memory_mb + storage_mb) = 48 GiB" in said
    assert "7 GiB of disk" in said
    assert "in images" not in notes("a:b")
    (tmp_path / "tasks/images.json").unlink()
    assert "16 episodes at once x 3,072 MiB (the default of a task" in notes(
        "rpg_megatron.environments.harbor:play"
    )
