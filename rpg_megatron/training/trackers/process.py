"""The process of one tracker: ``python -m rpg_megatron.training.trackers.process RUN_DIR INDEX``.

INDEX: in ``trackers``. Reads JSON lines from stdin: null starts the tracker, an object logs a step,
``"close"`` closes it. Answers each line with null or an error message. Output of the tracker's package goes
to stderr. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import cast

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.trackers import ImportedTrackerSettings, MLflowSettings, WandbSettings
from rpg_megatron.system.custom_code import CustomCode, load_custom
from rpg_megatron.training.trackers.texts import ResponseTexts
from rpg_megatron.training.trackers.tracker import FOLDER, TrackedRun, Tracker

_LONGEST = 8000
"""Maximum characters of a text in the table of responses; the middle of longer ones is removed."""
_DEFAULTS = {
    # MLflow would otherwise retry for a quarter of an hour before it raises.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    # By default the last 15 seconds of an offline run are lost when it is killed.
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",
}


def open_tracker(settings: Settings, index: int, folder: Path) -> Tracker:
    """Start or resume ``settings.trackers[index]``. Raises the exceptions of its package."""
    chosen = settings.trackers[index]
    run = TrackedRun(folder.name, folder, settings.model_dump(mode="json"), chosen.type)
    if isinstance(chosen, WandbSettings):
        from rpg_megatron.training.trackers.wandb_tracker import WandbTracker

        return WandbTracker(run, chosen)
    if isinstance(chosen, MLflowSettings):
        from rpg_megatron.training.trackers.mlflow_tracker import MLflowTracker

        return MLflowTracker(run, chosen)
    assert isinstance(chosen, ImportedTrackerSettings)
    return cast(Tracker, load_custom(CustomCode(f"trackers[{index}]", chosen.type, chosen.keywords, 1))(run))


def main() -> None:
    """Serve requests from stdin until it is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal all processes; the rank ends this one
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    tracker: Tracker | None = None
    texts: ResponseTexts | None = None
    for line in sys.stdin:
        item = json.loads(line)
        problem = None
        try:
            if tracker is None or texts is None:
                settings = load_settings(folder / "config.yaml")
                (folder / FOLDER).mkdir(exist_ok=True)
                texts = ResponseTexts(settings.model.path, _LONGEST)
                tracker = open_tracker(settings, index, folder)
            elif item == "close":
                if hasattr(tracker, "close"):
                    tracker.close()
            else:
                responses = [texts.readable(row) for row in item["responses"]]
                tracker.log(item["step"], item["metrics"], responses)
        except UserError as e:
            problem = str(e)
        except (Exception, SystemExit) as e:
            traceback.print_exc()
            problem = f"{type(e).__name__}: {' '.join(str(e).split())}"
        answers.write(json.dumps(problem) + "\n")
        answers.flush()
    sys.stderr.flush()
    os._exit(0)  # the packages' threads and exit handlers may wait for a server


if __name__ == "__main__":
    main()
