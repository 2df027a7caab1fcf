"""``rpg-megatron report``: an HTML report of one or more runs."""

from rpg_megatron.commands.report.render import watch_report, write_report

__all__ = ["watch_report", "write_report"]
