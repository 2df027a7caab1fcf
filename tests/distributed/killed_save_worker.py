"""test_resume_layouts: a rank that loads the newest complete checkpoint, checks it, and saves again and
again.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from rpg_megatron.checkpoints.run_folder import find_problems, list_steps
from rpg_megatron.config import Settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.training.checkpoint_saver import Saver, load_run
from tests.distributed.async_checkpoint_worker import build, fill, numbers


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings.model_validate_json((folder / "config.yaml").read_text())
    device = start_device("cpu")
    start_process_group(device)
    mesh, policy, anchor = build(settings, device)
    step = 0
    whole = [place for place in list_steps(folder).values() if not find_problems(place)]
    if whole:
        fill(policy, 0.5)
        step = load_run(whole[0], policy, anchor)["step"]
        assert all(bool((t == step).all()) for t in numbers(policy))
        with anchor.swapped_in():
            assert all(bool((p == -step).all()) for _, p in policy.named_parameters())
    saver = Saver(folder, policy, anchor, settings.checkpoint)
    gc.collect()
    gc.freeze()  # as a trainer does
    print(f"at {step}", flush=True)
    while True:
        step += 1
        fill(policy, -step)
        anchor.after_step(1, 0.0)
        fill(policy, step)
        if mesh.rank == 0:
            print(f"saving {step}", flush=True)
        saver.start(step, dict)
        fill(policy, float("nan"))  # the background save must not read these
        saver.wait()
        (outcome,) = saver.pop_results()
        assert outcome.problem is None, outcome
        if mesh.rank == 0:
            print(f"saved {step} in {outcome.seconds:.3f}", flush=True)


if __name__ == "__main__":
    main()
