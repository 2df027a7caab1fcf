"""Supervision: whatever happens to a launcher, nothing of its run stays behind, and the cause is named.

Why: a leaked vLLM worker holds memory until somebody notices, and "connection reset" on rank 3 hides that
rank 1 ran out of memory. The whole launcher runs here, with stand-ins for engine, sampler and ranks that
start grandchildren as vLLM does. Not covered: the real engine, sampler and ranks (tests/integration).
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rpg_megatron.launcher.summary import summarise
from tests.support.commands import wait_for_our_code
from tests.support.forking import fresh_starts
from tests.support.launcher import LIMIT, Launch, assert_nothing_left, living, wait_for

pytestmark = pytest.mark.usefixtures("forked_starts")


def test_a_ranks_user_error_is_one_message_and_leaves_nothing(launch, tmp_path: Path):
    # rank 0 fails first, as when its peer closes the connection; rank 1 has the reason.
    launcher = launch(
        rank_0="sys.exit('Traceback: connection closed by peer')",
        rank_1="""
print('error: the tokenizer is broken; mend it', flush=True)
until(lambda: gone('rank_0'))
os._exit(2)
""",
    )
    code, _, err = launcher.finish()
    assert (code, err) == (2, "error: the tokenizer is broken; mend it\n")
    assert_nothing_left(launcher)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_users_error_before_the_ranks_are_forked_is_one_message(launch, tmp_path: Path):
    launcher = launch(ranks="print('error: no such device; choose another', flush=True); os._exit(2)")
    code, _, err = launcher.finish()
    assert (code, err) == (2, "error: no such device; choose another\n")
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_death_of_the_ranks_parent_is_named(launch):
    launcher = launch(rank_1="os.kill(os.getppid(), 9)")
    code, _, err = launcher.finish()
    assert code == 1
    assert "ranks was killed (SIGKILL" in err
    assert_nothing_left(launcher)


def test_a_warning_before_the_ranks_are_forked_requeues(launch):
    launcher = launch(ranks="time.sleep(600)")
    wait_for(lambda: len(launcher.stand_ins()) == 4)
    launcher.process.send_signal(signal.SIGTERM)
    code, _, err = launcher.finish()
    assert code == 75, err
    assert "no step was done; rerun the same command" in err
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []


@pytest.mark.parametrize(
    ("child", "script", "message"),
    [
        ("rank_1", "print('last words', flush=True); os._exit(7)", "rank_1 ended with exit code 7"),
        pytest.param(
            "rank_0",
            "print('last words', flush=True); os.kill(os.getpid(), 9)",
            "rank_0 was killed (SIGKILL",
            marks=pytest.mark.long,
        ),
        ("sampler", "print('last words', flush=True); os._exit(0)", "sampler ended before the run did"),
        ("ranks", "print('last words', flush=True); os._exit(7)", "ranks ended with exit code 7"),
    ],
)
def test_the_death_of_any_child_ends_the_run_and_is_explained(
    launch, tmp_path: Path, child: str, script: str, message: str
):
    launcher = launch(**{child: script})
    code, _, err = launcher.finish()
    assert code == (2 if "ended while starting" in err else 1)
    assert message in err
    assert "Traceback" not in err
    if "ended while starting" not in err:
        assert "last words" in err
    assert (tmp_path / "runs" / "tiny-001" / "logs" / "sampler.log").exists()
    assert "tiny-001" in err
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []


WITHOUT_LOGS = """
run = pathlib.Path(sys.argv[1])
(run / 'checkpoints' / 'step_000002').mkdir(parents=True)
(run / 'checkpoints' / 'step_000002' / 'manifest.json').touch()
import shutil; shutil.rmtree(run / 'logs')
print('last words', flush=True)
os._exit(7)
"""


def test_the_reason_is_told_also_if_the_logs_are_deleted(launch, tmp_path: Path):
    """The end of a process's log is still there, and where the run can be resumed."""
    launcher = launch(rank_0=WITHOUT_LOGS)
    code, _, err = launcher.finish()
    assert code == 1
    assert err.startswith("error: rank_0 ended with exit code 7; the end of ")
    assert "\n(the file was deleted during the run)\nlast words\n" in err
    assert err.endswith("; the same command resumes it from runs/tiny-001/checkpoints/step_000002\n")
    assert "last words" in (tmp_path / "runs" / "tiny-001" / "logs" / "launcher.log").read_text()
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []


def test_limits_are_raised_and_reached_ones_are_named(launch, tmp_path: Path):
    space = 100 * 1024**3
    reached = """
import resource
(here / 'files').write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
print('MemoryError', flush=True)
os._exit(7)
"""
    launcher = launch(prefix=("prlimit", "--nofile=96:5000", f"--as={space}"), rank_0=reached)
    code, _, err = launcher.finish()
    assert code == 1
    assert (tmp_path / "files").read_text() == "(5000, 5000)"
    assert f"a limit of the shell may be the cause: ulimit -v is {space // 1024}; raise it" in err


def test_a_sampler_that_dies_as_ranks_finish_fails_nothing(launch, tmp_path: Path):
    """Only the ranks are still needed then, so the run succeeds."""
    ends = """
until(lambda: gone('sampler'))
pathlib.Path(sys.argv[1], 'summary.json').write_text('{"steps": 2, "seconds": 61}')
os._exit(0)
"""
    launcher = launch(rank_0=ends, rank_1=ends, sampler="os.kill(os.getpid(), 9)")
    code, out, err = launcher.finish()
    assert (code, err) == (0, "")
    assert "2 in 1:01" in out
    assert_nothing_left(launcher)


def test_restarts_of_an_engine_that_keeps_dying_are_limited(launch, tmp_path: Path):
    dies = "until((here / 'go').exists); print('last words', flush=True); os._exit(0)"
    launcher = launch(engine=dies)
    launcher.wait_until_told("engine 0 is up")
    (tmp_path / "go").touch()
    code, out, err = launcher.finish()
    # How quickly it dies decides which of the two it is.
    died = r"engine 0 (died|ended while starting)"
    notices = [line for line in out.splitlines() if re.search(died, line)]
    assert len(notices) == 3, out + err
    for number, line in enumerate(notices, 1):
        assert re.match(rf"warning: {died}; restart {number} of 3; log: ", line)
    assert code == 1
    assert re.match(
        rf"error: {died} \(already restarted 3 of 3 times: engine\.restarts\); the end of ", err
    ), err
    assert "last words" in err
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_stops_everything(launch, tmp_path: Path, number: signal.Signals, code: int):
    """A warned rank that has done no step just ends: the same command starts the run again."""
    launcher = launch()
    launcher.wait_until_up()
    assert len(launcher.folders()) == 2
    launcher.process.send_signal(number)
    returned, out, err = launcher.finish()
    assert returned == code, out + err
    assert err.startswith("stopped: ")
    assert err.count("\n") == 1
    assert_nothing_left(launcher)
    assert len(list((tmp_path / "runs").iterdir())) == (number == signal.SIGINT)


SAVES = """
def save(number, frame):
    global asked
    asked = True
asked = False
signal.signal(signal.SIGTERM, save)
(here / ('listens_' + os.environ['RANK'])).touch()
while not asked:
    time.sleep(0.1)
"""


def warn(launcher: Launch, number: signal.Signals) -> None:
    """Signal a launcher whose ranks have something to save."""
    wait_until_ranks_listen(launcher)
    launcher.process.send_signal(number)


def wait_until_ranks_listen(launcher: Launch) -> None:
    launcher.wait_until_up()
    wait_for(lambda: all((launcher.folder / f"listens_{rank}").exists() for rank in (0, 1)))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGUSR1])
def test_a_warned_run_is_saved_and_asks_to_be_queued_again(launch, number: signal.Signals):
    saves = SAVES + "print('saved', flush=True); os._exit(75)"
    launcher = launch(rank_0=saves, rank_1=saves)
    warn(launcher, number)
    launcher.process.send_signal(number)  # as srun does, which passes on what every process got already
    code, out, err = launcher.finish()
    assert code == 75, err
    assert f"warning: {number.name}: saving, then exiting" in out
    assert err.startswith(f"stopped: {number.name}; ")
    assert_nothing_left(launcher)


ONE_STEP = "open(sys.argv[1] + '/metrics.jsonl', 'w').write('{\"step\": 1}\\n')\n"


@pytest.mark.parametrize("presses", [1, 2])
def test_the_first_ctrl_c_saves_and_the_second_ends(launch, presses: int):
    """Once a step is done; before, there is nothing to save, and the first one ends the run."""
    saved = "os.makedirs(to := sys.argv[1] + '/checkpoints/step_000001', exist_ok=True)\n"
    saved += "open(to + '/manifest.json', 'w').close(); os._exit(75)"
    saves = "import sys\n" + SAVES + (saved if presses == 1 else "time.sleep(600)")
    launcher = launch(rank_0=saves.replace("asked = False", ONE_STEP + "asked = False"), rank_1=saves)
    wait_until_ranks_listen(launcher)
    launcher.wait_until_told("step ")  # the launcher has read the step's row
    launcher.process.send_signal(signal.SIGINT)
    message = "warning: Ctrl-C: saving, then exiting; press Ctrl-C again to stop without saving"
    if presses == 2:
        launcher.wait_until_told(message)
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGINT)
    code, out, err = launcher.finish()
    assert code == 130, err
    assert message in out.splitlines()
    end = "rerun the same command to resume from" if presses == 1 else "the run's folder is kept"
    assert err.startswith(f"stopped: Ctrl-C; {end}"), err
    assert_nothing_left(launcher)


def test_a_second_signal_ends_a_run_that_cannot_save(launch, tmp_path: Path):
    hangs = SAVES + "time.sleep(600)"
    launcher = launch(rank_0=hangs, rank_1=hangs)
    warn(launcher, signal.SIGTERM)
    launcher.wait_until_told("saving, then exiting")
    time.sleep(1.5)  # signals within a second count as one
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGUSR1)
    code, _, err = launcher.finish()
    assert code == 143
    assert "the run's folder is kept" in err
    assert_nothing_left(launcher)


@pytest.mark.parametrize(
    ("option", "message"),
    [("checkpoint.grace=1.5", "checkpoint.grace"), ("checkpoint.every=null", "is null")],
)
def test_a_run_that_is_not_saved_does_not_say_so(
    tmp_path: Path, config_file: Path, option: str, message: str
):
    hangs = SAVES + "time.sleep(600)"
    launcher = Launch(tmp_path, config_file, option, rank_0=hangs, rank_1=hangs)
    try:
        warn(launcher, signal.SIGTERM)
        code, out, err = launcher.finish()
    finally:
        launcher.process.kill()
        launcher.process.communicate()
    assert code == 143
    assert message in out + err
    assert_nothing_left(launcher)


def test_a_signal_to_every_process_is_a_warning(launch):
    """As scancel sends it. Sampler and engine end; the ranks still save."""
    saves = SAVES + "until((here / 'saved').exists); os._exit(75)"
    launcher = launch(rank_0=saves, rank_1=saves, sampler="signal.pause()", engine="signal.pause()")
    wait_until_ranks_listen(launcher)
    files = (launcher.folder / f"pid_{name}" for name in ("sampler", "engine", "rank_0", "rank_1"))
    for pid in [int(file.read_text()) for file in files]:
        os.kill(pid, signal.SIGTERM)
    launcher.process.send_signal(signal.SIGTERM)
    launcher.wait_until_told("saving, then exiting")
    (launcher.folder / "saved").touch()
    code, _, err = launcher.finish()
    assert code == 75, err
    assert_nothing_left(launcher)


@pytest.mark.parametrize(
    "delay", [0.2, 0.6, *(pytest.param(delay, marks=pytest.mark.long) for delay in (0.0, 0.4, 0.8))]
)
def test_ctrl_c_at_any_moment_of_the_start(launch, tmp_path: Path, delay: float):
    with fresh_starts():
        launcher = launch()
    wait_for_our_code(launcher.process)
    time.sleep(delay)
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = launcher.finish()
    assert code in (130, -signal.SIGINT), err  # the second: between two blocks that guard imports
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []


@pytest.mark.long  # a process for each moment
def test_ctrl_c_after_the_interpreter_has_started_shows_no_traceback(config_file: Path):
    code = "import rpg_megatron.system.terminal; print(flush=True); from rpg_megatron.cli import main; main()"
    for moment in range(30):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "train", str(config_file), "model.path=/nowhere"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + 0.07 * moment)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode in (130, 2, -signal.SIGINT), err
        assert "Traceback" not in err


def test_kill_9_of_the_launcher_leaves_nothing(launch):
    launcher = launch()
    launcher.wait_until_up()
    folders = launcher.folders()
    assert len(folders) == 2
    launcher.process.kill()
    launcher.process.wait()
    wait_for(lambda: not living(launcher.stand_ins()))
    wait_for(lambda: not any(folder.exists() for folder in folders))


DONE = """
until((here / 'go').exists)
pathlib.Path(sys.argv[1], 'summary.json').write_text('{"steps": 2, "seconds": 61}')
os._exit(0)
"""


@pytest.mark.parametrize("lost", ["pipe", "terminal", "closed"])
def test_a_run_without_readers_of_its_output_goes_on_to_its_end(launch, tmp_path: Path, lost: str):
    """``| head``, a terminal that is gone, ``>&- 2>&-`` under nohup; the run's log has its output."""
    if lost == "closed":
        prefix = ("sh", "-c", 'trap "" HUP; exec "$@" <&- >&- 2>&-', "sh")
        launcher = launch(rank_0=DONE, rank_1=DONE, prefix=prefix)
    elif lost == "terminal":
        master, slave = pty.openpty()
        launcher = launch(rank_0=DONE, rank_1=DONE, streams={"stdout": slave, "stderr": slave})
        os.close(slave)
    else:
        launcher = launch(rank_0=DONE, rank_1=DONE)
        launcher.process.stdout.close()
        launcher.process.stderr.close()
        launcher.process.stdout = launcher.process.stderr = None
    launcher.wait_until_up()
    if lost == "terminal":
        os.close(master)
    if lost == "closed":
        launcher.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert launcher.process.wait(LIMIT) == 0
    log = (tmp_path / "runs/tiny-001/logs/launcher.log").read_text()
    assert "starting (takes about a minute)" in log
    assert "2 in 1:01" in log
    assert_nothing_left(launcher)


def test_a_signal_to_a_run_without_readers_has_its_exit_code(launch):
    saves = SAVES + "os._exit(75)"
    launcher = launch(rank_0=saves, rank_1=saves)
    launcher.process.stdout.close()
    launcher.process.stderr.close()
    launcher.process.stdout = launcher.process.stderr = None
    warn(launcher, signal.SIGTERM)
    assert launcher.process.wait(LIMIT) == 75
    assert_nothing_left(launcher)


def test_a_run_without_its_last_checkpoint_is_not_a_success(launch, tmp_path: Path):
    facts = '{"unsaved": "the disk is full"}'
    write = f"pathlib.Path(sys.argv[1], 'summary.json').write_text({facts!r}); os._exit(0)"
    code, out, _ = launch(rank_0=write, rank_1="os._exit(0)").finish()
    assert code == 74
    assert re.search(r"last checkpoint +NOT WRITTEN: the disk is full", out)
    assert "rerun the same command: it resumes from the beginning" in out


def test_a_closed_terminal_ends_a_run_but_a_closed_pipe_does_not(launch):
    launcher = launch(prefix=("env", "--default-signal=HUP"))  # nohup may have been used for these tests
    launcher.wait_until_up()
    launcher.process.stdout.close()
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.wait() == 129
    assert_nothing_left(launcher)


def test_a_finished_run_prints_its_summary(launch, tmp_path: Path):
    facts = {
        "steps": 2,
        "accuracy_before": {"heldout": 0.25},
        "accuracy_after": {"heldout": 0.75},
        "tokens_per_second": 1234.5,
        "seconds": 61,
    }
    text = json.dumps(facts)
    write = f"pathlib.Path(sys.argv[1], 'summary.json').write_text({text!r}); os._exit(0)"
    launcher = launch(rank_0=write, rank_1="os._exit(0)")
    code, out, err = launcher.finish()
    assert (code, err) == (0, "")
    assert "25.0% before, 75.0% after (+50.0 points)" in out
    assert "2 in 1:01" in out
    assert "1,234" in out or "1,235" in out
    assert re.search(r"report +runs/tiny-001/report\.html", out)
    assert (tmp_path / "runs/tiny-001/report.html").stat().st_size > 10_000
    assert len(json.loads((tmp_path / "runs/tiny-001/environment.json").read_text())) == 1
    assert_nothing_left(launcher)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([{"role": "user", "content": "1+1"}], "([{'role': 'user', 'content': '1+1'}])"),
        ("Compute 1+1\n", r"('Compute 1+1\n')"),
        ('End with "Answer: " and so on', r"('End with \x22Answer: \x22 and so on')"),
        ("it's $\\frac{1}{2}$ of `id` ü! \\\\ \r\n\ttab", r"of \x60id\x60 ü\x21"),
    ],
)
def test_the_command_at_the_end_of_a_run_asks_what_it_says(
    tmp_path: Path, config_file: Path, prompt: str | list[dict[str, str]], shown: str
):
    """In a shell, with a stand-in for transformers that prints its arguments."""
    run = tmp_path / 'it\'s a "run" $HOME'
    run.mkdir()
    settings = yaml.safe_load(config_file.read_text())
    settings["data"] |= {"path": str(run / "data.jsonl"), "chat": isinstance(prompt, list)}
    (run / "data.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}))
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "summary.json").write_text(json.dumps({"export": str(run / "hf")}))
    (tmp_path / "transformers.py").write_text(
        "def pipeline(task, model):\n"
        "    return lambda text: [{'generated_text': ascii([task, model, text])}]\n"
    )
    command = summarise(run).splitlines()[-1]
    assert shown in command
    done = subprocess.run(
        ["sh", "-c", command], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.stderr, done.stdout) == ("", f"{['text-generation', str(run / 'hf'), prompt]!a}\n")
