"""Settings of multi-node runs."""

from __future__ import annotations

from pydantic import Field

from rpg_megatron.config.base import Section

TOKEN_VARIABLE = "RPG_ENGINE_TOKEN"
"""Environment variable with the run's bearer token; never on a command line, which other users can read."""
BRIDGE_VARIABLE = "RPG_BRIDGE_DIR"
"""Environment variable of engines with the folder in which the trainers publish weights."""
ENGINES_START = "engines-start"
"""File of the first node's work folder while colocated engines start: ranks allocate when it is gone."""
RENDEZVOUS_VARIABLE = "RPG_RENDEZVOUS"
"""Set for trainer ranks on a single node: the file in which they find each other."""
RANK_LOGS_VARIABLE = "RPG_RANK_LOGS"
"""Set, instead of RANK, for a process that forks all trainer ranks: the folder of their logs."""
ADDRESS_VARIABLE = "RPG_NODE_ADDRESS"
"""Environment variable with the node's cluster address, set by the launcher for its child processes; unset on
a single node."""
JOB_END_VARIABLE = "SLURM_JOB_END_TIME"
"""Environment variable with the Unix time at which Slurm ends the job; the launcher sets it where Slurm does
not."""


class ClusterSettings(Section, affects="placement"):
    """Placement on nodes, and their network. No effect on a single node."""

    trainer_nodes: int | None = Field(None, ge=1)
    """Number of nodes, the first ones, that the trainer ranks are distributed over evenly; null: all."""
    engine_nodes: int | None = Field(None, ge=1)
    """Number of nodes, the last ones, that the engines are distributed over evenly; null: all. With a
    multiple of ``engine.replicas``, each engine is on several nodes, which have equal shares of its
    ``engine.tensor`` workers and use all GPUs that trainer ranks leave."""
    interface: str | None = None
    """Network interface between nodes, such as ib0, the same on each node; null: the interface that the
    node's host name resolves to."""
    min_bandwidth: float | None = Field(None, ge=0)
    """Least bandwidth between nodes in GB/s. ``doctor`` under ``srun`` measures it by an all-reduce over the
    first GPU of each node (gloo on a CPU), and warns if it is lower. null: half of the card's usual
    port, 25 for H100, H200 and B200, 12.5 for A100, none for other cards and CPUs; 0: it is not measured."""
    join_timeout: float = Field(300.0, gt=0)
    """Time limit for all nodes to connect at the start, in seconds."""
    silence: float = Field(60.0, gt=0)
    """Seconds without a heartbeat after which a node counts as lost and the run ends."""


class JobSettings(Section, affects="placement"):
    """Restarts of a batch job by its script (slurm/README.md). No effect elsewhere."""

    max_restarts: int = Field(3, ge=0)
    """How often the job is started again after failures of the machine without a new checkpoint between them:
    a lost node, a killed process, errors of NCCL, a GPU or the file system. Errors of settings, data and code
    end it."""
