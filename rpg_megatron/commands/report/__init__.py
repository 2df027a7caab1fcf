"""``rpg-megatron report``: an HTML report of one or more runs."""

from rpg_megatron.commands.report.render import write_report

__all__ = ["write_report"]
