"""Training runs as NeMo-Run experiments: where they run is one object, what they run another.

    python examples/nemo_run_recipe.py config.yaml                # here, one after another
    python examples/nemo_run_recipe.py config.yaml --account me --partition gpu --nodes 2
    python examples/nemo_run_recipe.py config.yaml --account me --login HOST --job-dir /scratch/me/nemo

Start it from the folder that the runs are to go to; with --login it and the config have the same paths on the
cluster. It needs requirements/launch.txt and no torch; RPG_MEGATRON names the training environment's
rpg-megatron. A single run needs no recipe: rpg-megatron launch.
"""

from __future__ import annotations

import argparse
import getpass
import os
from pathlib import Path

import nemo_run as run

from rpg_megatron.commands.launch.job_script import SLURM, training_script

LEARNING_RATES = ("1e-6", "3e-6")
COMMAND = os.environ.get("RPG_MEGATRON", "rpg-megatron")


def local_executor() -> run.LocalExecutor:
    """This machine."""
    return run.LocalExecutor()


def slurm_executor(
    account: str, partition: str | None, nodes: int, gpus: int | None, login: str | None, job_dir: str
) -> run.SlurmExecutor:
    """A cluster, from one of its nodes or, with the name of a login node, by SSH from elsewhere.

    ``SLURM`` has what a job of ours needs: one launcher a node, a warning before the time is over, and the
    lines that have the job requeued when the warned run has saved. Override what you like.
    """
    tunnel = (
        run.SSHTunnel(host=login, user=getpass.getuser(), job_dir=job_dir)
        if login
        else run.LocalTunnel(job_dir=job_dir)
    )
    arguments = SLURM | {"time": "08:00:00"}
    return run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=nodes,
        gpus_per_node=gpus,
        tunnel=tunnel,
        packager=run.Packager(),  # nothing is packed: the cluster has the environment, the model and the data
        **arguments,
    )


def training(config: Path, name: str, overrides: list[str], nodes: int) -> run.Script:
    """One run. It has a name of its own, so that it is not taken for another one to be continued."""
    words = [f"name={name}", *overrides]
    return run.Script(inline=training_script(config, words, nodes=nodes, command=COMMAND))


def main() -> None:
    """Compare learning rates."""
    parser = argparse.ArgumentParser(description="Compare learning rates, as one NeMo-Run experiment.")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--account", help="of the cluster; without it the runs are made here")
    parser.add_argument("--partition")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, help="of each node")
    parser.add_argument("--login", help="host to submit from, by SSH")
    parser.add_argument("--job-dir", default="", help="NeMo-Run's folder on the cluster")
    parser.add_argument("--dryrun", action="store_true")
    given = parser.parse_args()

    place = (given.account, given.partition, given.nodes, given.gpus, given.login, given.job_dir)
    executor = slurm_executor(*place) if given.account else local_executor()
    with run.Experiment("rpg-learning-rates", executor=executor) as experiment:
        for rate in LEARNING_RATES:
            name = f"lr-{rate}"
            task = training(given.config, name, [f"optimizer.lr={rate}", *given.overrides], given.nodes)
            experiment.add(task, name=name, tail_logs=not given.account)
        if given.dryrun:
            experiment.dryrun()
        else:
            experiment.run(sequential=not given.account, detach=bool(given.account))


if __name__ == "__main__":
    main()
