"""What ``rpg-megatron audit`` takes from a run or a config file, and what it refuses before it starts.

Why: an audit starts engines and ranks; what is wrong with its input must be known before. Not covered: what
an audit finds (test_audit_verdict, tests/integration/test_audit.py), its processes (test_audit_launch).
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rpg_megatron import cli
from rpg_megatron.commands.audit import command
from rpg_megatron.commands.audit.command import plan_audit
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.engine.command import engine_command
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.launcher.stopping import StopSignals
from tests.support.tiny_models import write_byte_model


def test_a_run_gives_its_newest_weights_and_tokens(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-001"
    for step in (1, 2, 10):
        (run / "hf" / f"step_{step:06d}").mkdir(parents=True)
    (run / "rollouts").mkdir()
    for step in (9, 10):
        (run / "rollouts" / f"step_{step:06d}.parquet").touch()
    shutil.copyfile(config_file, run / "config.yaml")
    shutil.copyfile(config_file.parent / "train.jsonl", run / "train.jsonl")
    settings, request = plan_audit(run, ["seed=5"])
    assert settings.model.path == run / "hf" / "step_000010"
    assert (settings.name, settings.runs, settings.seed) == ("tiny-audit", run.parent, 5)
    assert request["rollouts"] == str(run / "rollouts" / "step_000010.parquet")
    assert [Path(p).name for p in request["others"].values()] == ["model", "step_000001", "step_000002"]
    settings, request = plan_audit(config_file, None)
    assert (settings.name, request) == ("tiny-audit", {})
    settings, _ = plan_audit(config_file, ["rollout={ahead: 1, inflight: drain}", "guards.uncorrected=true"])
    assert settings.rollout.ahead == 0  # its engines must have no other requests
    written = tmp_path / "again.yaml"
    written.write_text(resolved_yaml(settings))
    assert load_settings(written) == settings
    with pytest.raises(UserError, match=r"holds no config\.yaml; give a config file, or the folder of a run"):
        plan_audit(tmp_path, None)


def test_a_run_of_adapters_gives_them_apart_from_its_model(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny-001"
    (run / "hf" / "step_000002").mkdir(parents=True)
    shutil.copyfile(config_file, run / "config.yaml")
    shutil.copyfile(config_file.parent / "train.jsonl", run / "train.jsonl")
    overrides = ["lora.rank=8", "model.adapter=start"]
    merged = plan_audit(run, overrides)[0].model
    assert (merged.path, merged.adapter) == (run / "hf" / "step_000002", None)
    (run / "adapters" / "step_000002").mkdir(parents=True)
    model = plan_audit(run, overrides)[0].model
    assert (model.path.name, model.adapter) == ("model", run / "adapters" / "step_000002")


def test_engines_of_an_audit_return_no_routes(config_file, tmp_path, monkeypatch) -> None:
    """For routes vLLM needs cached prefixes, which an audit's engines must not have."""
    given = {}

    def stop(*_: object, engine_settings: Settings, **__: object) -> None:
        given["engines"] = engine_settings
        raise UserError("started")

    monkeypatch.setattr(command, "run_ranks", stop)
    model = write_byte_model(tmp_path / "moe", family="qwen2_moe", num_attention_heads=2)
    overrides = [f"model.path={model}", "training.router_replay=rollout"]
    with pytest.raises(UserError, match="started"):
        command.audit(config_file, overrides, StopSignals(), None, None)
    arguments = engine_command(given["engines"], 0, tmp_path / "e.sock")
    assert "--no-enable-prefix-caching" in arguments
    assert "--enable-return-routed-experts" not in arguments


def test_what_cannot_be_audited_is_said_before_anything_starts(
    config_file: Path, tmp_path: Path, make_checkpoint: Callable[..., Path]
) -> None:
    def refusal(*options: str) -> str:
        result = CliRunner().invoke(cli.app, ["audit", str(config_file), *options])
        assert isinstance(result.exception, UserError), result
        return str(result.exception)

    # Another rotary embedding may be: the audit shows it.
    larger = make_checkpoint(tmp_path / "larger", num_hidden_layers=3, rope_theta=2e4)
    assert "is a different model than model.path (num_layers 3, not 2)" in refusal(
        "--engine-model", str(larger)
    )
    nowhere = tmp_path / "nowhere"
    assert f"--engine-model: {nowhere} is not a directory" in refusal("--engine-model", str(nowhere))
    assert "create it, or choose another" in refusal("--json", str(tmp_path / "no" / "file"))
    for family in ("granite", "olmo3", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        other = make_checkpoint(tmp_path / family, family=family)
        assert f"does not know the modules of {family} models" in refusal(f"model.path={other}")
    settings = yaml.safe_load(config_file.read_text()) | {
        "data": {"path": "missing.jsonl", "max_prompt_tokens": 9}
    }
    config_file.write_text(yaml.safe_dump(settings))
    assert "missing.jsonl" in refusal()
    assert not (tmp_path / "runs").exists()
