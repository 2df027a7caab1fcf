"""test_resume_layouts: one rank that takes up the newest whole checkpoint, checks it, and saves on and on.

``save_worker.py FOLDER [BYTES]``: after the first save no file may be larger than this, as on a full disk.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

from rpg_megatron.policy.runtime import start_device, start_process_group  # isort: skip

import torch

from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.model import start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.checkpoints import find_problems, list_steps, remove_old
from rpg_megatron.training.state import load_run, save_run


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings.model_validate_json((folder / "config.yaml").read_text())
    device = start_device("cpu")
    start_process_group(device)
    mesh = start_mesh(settings.parallel)
    shape = read_model_shape(settings.model.path)
    policy = Policy(settings, shape, mesh, device, lambda policy: None)
    parameters = [p for _, p in policy.named_parameters()]
    anchor = HeldAnchor(parameters, settings.anchor)
    step = 0
    whole = [place for place in list_steps(folder).values() if not find_problems(place)]
    if whole:
        step = load_run(whole[0], policy, anchor)["step"]
        assert all(bool((p == step).all()) for p in parameters)
        with anchor.swapped_in():
            assert all(bool((p == -step).all()) for p in parameters)
    print(f"at {step}", flush=True)
    while True:
        step += 1
        for value in (-step, step):
            with torch.no_grad():
                for p in parameters:
                    p.fill_(value)
            if value < 0:
                anchor = HeldAnchor(parameters, settings.anchor)
        try:
            save_run(folder, step, policy, anchor, lambda: {})
        except UserError as e:
            print(f"refused {e}", flush=True)
            return
        remove_old(folder, 2, None)
        print(f"saved {step}", flush=True)
        for limit in map(int, sys.argv[2:]):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


if __name__ == "__main__":
    main()
