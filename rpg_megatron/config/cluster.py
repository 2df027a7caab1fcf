"""Settings of a run on several nodes."""

from __future__ import annotations

from pydantic import Field

from rpg_megatron.config.base import Section

ADDRESS_VARIABLE = "RPG_NODE_ADDRESS"
"""Environment variable by which a launcher tells its children the node's address in the cluster; unset where
there is one node."""


class ClusterSettings(Section):
    """Which node does what, and how nodes reach each other. Without effect on one node."""

    trainer_nodes: int | None = Field(None, ge=1)
    """Trainer ranks are spread evenly over so many nodes, the first ones; null: over all."""
    engine_nodes: int | None = Field(None, ge=1)
    """Engines are spread evenly over so many nodes, the last ones; null: over all."""
    interface: str | None = None
    """Network interface that nodes talk over, such as ib0, the same on each; null: the one that the node's
    name stands for."""
    join_timeout: float = Field(300.0, gt=0)
    """Seconds that nodes wait for each other at the start."""
    silence: float = Field(60.0, gt=0)
    """Seconds without a sign of life after which a node counts as lost, and the run ends."""
