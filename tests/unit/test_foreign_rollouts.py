"""Foreign rollouts are read bit-equal in a process that can reach nothing; damage is one message.

Why: a report and a start from another user's run read files that anybody may have made, and Arrow's decoders
trust them. Not covered: that the process can reach nothing (test_foreign_input), and faults of the decoders.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rpg_megatron.config import UserError
from rpg_megatron.data import foreign_rollouts
from rpg_megatron.data.foreign_rollouts import iter_foreign_rollouts
from rpg_megatron.data.rollout_files import iter_rollouts, part_file, write_rollouts
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.system.foreign_input import read_foreign


def make_trajectory(group: int, **fields: Any) -> Trajectory:
    """A trajectory with NaNs of several bits, a negative zero and routes."""
    floats = np.array([0x7FC00001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)
    tokens = np.arange(3, dtype=np.int32)
    t = Trajectory(7, 0, tokens[:2], tokens, floats, tokens, "stop", "é\u2028", parts={"a": -0.0})
    t = dataclasses.replace(t, old=floats, anchor=floats, group=group, extracted=None, advantage=float("nan"))
    t.routes = np.arange(4 * 2 * 2, dtype=np.int16).reshape(4, 2, 2)
    return dataclasses.replace(t, **fields)


def bits(trajectory: Trajectory) -> list[Any]:
    values = vars(trajectory).values()
    return [(v.dtype, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else repr(v) for v in values]


def test_steps_arrive_with_the_same_bits_through_one_process(tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(
        foreign_rollouts, "read_foreign", lambda *a, **k: (started.append(a), read_foreign(*a, **k))[1]
    )
    single, parts, long = (tmp_path / "rollouts" / f"step_00000{n}.parquet" for n in (1, 2, 3))
    masked = make_trajectory(2, mask=np.array([False, True, False]))
    write_rollouts(single, [make_trajectory(0), make_trajectory(1, anchor=np.zeros(3, np.float32)), masked])
    for number in range(2):
        write_rollouts(
            part_file(parts, number, 2), [make_trajectory(group) for group in (number, number + 2)]
        )
    write_rollouts(long, [make_trajectory(0), make_trajectory(1, text="x" * 5000), make_trajectory(2)])
    results = list(iter_foreign_rollouts([single, parts, long], tmp_path, 4000))
    for file in (single, parts):
        trajectories = [t for f, t in results if f == file]
        assert [bits(t) for t in trajectories if isinstance(t, Trajectory)] == list(
            map(bits, iter_rollouts(file))
        )
        assert all(isinstance(t, Trajectory) for t in trajectories)
    first, end = [t for f, t in results if f == long]
    assert isinstance(first, Trajectory)
    assert end is None  # more than the limit
    assert len(started) == 1


def _changed(name: str, change: Callable[[pa.Table], pa.Array]) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        write_rollouts(file, [make_trajectory(0, routes=np.zeros((0, 0, 0), np.uint8))])
        table = pq.read_table(file)
        pq.write_table(table.set_column(table.schema.get_field_index(name), name, change(table)), file)

    return write


def test_a_malformed_step_is_one_message_and_the_next_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(foreign_rollouts, "_LARGEST", 20_000)
    cases: dict[str, Callable[[Path], Any]] = {
        "reward is double with 1 nulls": _changed("reward", lambda t: pa.nulls(1, pa.float64())),
        "prompt_id is string": _changed("prompt_id", lambda t: pa.array(["a"])),
        "prompt is list<element: string>": _changed("prompt", lambda t: pa.array([["a"]])),
        "magic bytes not found": lambda file: file.write_bytes(b"no parquet at all"),
        "larger than": lambda file: write_rollouts(
            file, [make_trajectory(0, text="x" * 30_000)]
        ),  # ends the process
        "mask is list<element: int64> with 0 nulls": _changed("mask", lambda t: pa.array([[1, 0, 1]])),
        "mask has nulls in its lists": _changed("mask", lambda t: pa.array([[True, None, False]])),
        "mask of group 0": _changed("mask", lambda t: pa.array([[]], pa.list_(pa.bool_()))),
        "mask of group 3": lambda file: write_rollouts(file, [make_trajectory(3, mask=np.zeros(4, bool))]),
        "versions of group 0": lambda file: write_rollouts(
            file, [make_trajectory(0, versions=np.zeros(2, np.int32))]
        ),
    }
    files = [tmp_path / "rollouts" / f"step_{n:06d}.parquet" for n in range(len(cases) + 1)]
    for file, make in zip(files, cases.values(), strict=False):
        file.parent.mkdir(exist_ok=True)
        make(file)
    write_rollouts(files[-1], [make_trajectory(0)])
    *errors, (_, last) = iter_foreign_rollouts(files, tmp_path)
    assert [file for file, _ in errors] == files[:-1]
    for (file, error), message in zip(errors, cases, strict=True):
        assert isinstance(error, UserError)
        assert str(error).startswith(f"{file}: damaged (")
        assert message in str(error)
    assert isinstance(last, Trajectory)


def test_parts_of_a_step_that_is_refused_are_closed(tmp_path: Path) -> None:
    outside, step = tmp_path / "outside", tmp_path / "run" / "rollouts" / "step_000001.parquet"
    write_rollouts(outside, [make_trajectory(0)])
    step.parent.mkdir(parents=True)
    for number in range(2):
        write_rollouts(part_file(step, number, 3), [make_trajectory(number)])
    part_file(step, 2, 3).symlink_to(outside)
    before = set(os.listdir("/proc/self/fd"))
    results = [
        (error, set(os.listdir("/proc/self/fd")))
        for _, error in iter_foreign_rollouts([step], tmp_path / "run")
    ]
    (error, opened) = results[0]
    assert len(results) == 1
    assert "replace the link" in str(error)
    assert opened == before


def test_only_runs_of_ones_own_are_decoded_without_that_process() -> None:
    """Reports, samples and graded files use it."""
    package = Path(foreign_rollouts.__file__).parents[1]

    def users(names: str) -> set[str]:
        files = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
        return {str(f.relative_to(package)) for f, text in files.items() if re.search(rf"\b{names}\(", text)}

    commands = {"commands/replay/compare_steps.py", "commands/audit/compare_engines.py"}
    readers = {"data/rollout_files.py", "rollout/worker.py"}  # the worker reads what the sampler wrote
    assert users("(iter|read)_rollouts") == readers | commands
    confined = {f"commands/{name}.py" for name in ("report/samples", "api", "grade", "sample")}
    confined.add("data/conversations.py")
    assert users("iter_foreign_(rollouts|step)") == {"data/foreign_rollouts.py"} | confined


def test_a_trajectory_keeps_its_bits_between_processes() -> None:
    for t in (
        make_trajectory(0),
        make_trajectory(1, mask=np.array([True, False, True])),
        make_trajectory(2, mask=np.zeros(3, bool)),
    ):
        assert bits(decode(encode(t), Trajectory)) == bits(t)


def test_types_of_arrays_are_not_parsed() -> None:
    for dtype in ("," * 100, "f16", ">f4", "O", "(2,)f4"):
        packed = msgspec.msgpack.encode((dtype, b"\0" * 16, (1,)))
        with pytest.raises(msgspec.DecodeError, match="extension 1 of type"):
            decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, packed)), np.ndarray)
